"""Package and dependencies of afd_megatron. Tools are configured in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="afd_megatron",
    version="0.1.0",
    description="Attention-FFN disaggregated decoding of Megatron-core mixture-of-experts models",
    python_requires=">=3.11",
    packages=find_packages(include=["afd_megatron", "afd_megatron.*"]),
    install_requires=[
        "torch>=2.11,<2.14",
        "deepspeed>=0.19.8,<0.20",
        "megatron-core>=0.16.1,<0.17",
        "pydantic>=2.10,<3",
        "pyyaml>=6,<7",
        "safetensors>=0.5",
        "huggingface_hub>=1",
        "transformers>=5.10,<6",
        "jinja2>=3.1",  # chat templates, not declared by transformers
        "numpy>=1.26",
        "numba>=0.61",
        "tqdm>=4.66",
        "einops>=0.8",  # imported by Megatron, not declared there
        "psutil>=6",  # imported by Megatron, not declared there
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100"],
        "dev": ["ruff>=0.9", "mypy>=1.14", "import-linter>=2.1", "types-PyYAML", "types-psutil", "types-tqdm"],
    },
)
