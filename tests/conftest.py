"""Puts this folder on the path, so that all tests may import models_for_tests; skips GPU tests without a GPU."""

import os

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked gpu without a GPU; let it fail if AFD_REQUIRE_GPUS says that more must be here."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # other tests can do without it

    num_gpus, num_required = torch.cuda.device_count(), int(os.environ.get("AFD_REQUIRE_GPUS", "0"))
    if num_gpus < num_required:
        pytest.fail(f"{num_gpus} GPUs found (AFD_REQUIRE_GPUS: {num_required})", pytrace=False)
    if num_gpus == 0:
        pytest.skip("needs a CUDA device")
