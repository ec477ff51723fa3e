import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_megatron.engine.request import Request, SamplingParams
from afd_megatron.engine.sampler import sample, uniform

V = 50


def make_request(request_id: str = "a", sample_index: int = 0, **sampling: float) -> Request:
    return Request(request_id, sample_index, (1,), SamplingParams(**sampling))


def draw(logits_NV: torch.Tensor, *requests: Request, position: int = 1, vocab_size: int = V) -> list[int]:
    tokens = sample(logits_NV, requests, [position] * len(requests), vocab_size=vocab_size)
    return [token.token_id for token in tokens]


def reference(logits_V: np.ndarray, request: Request, position: int) -> int:
    """Draw one token the long way, on vLLM's definitions: every filter works on what the one before left."""
    params = request.sampling
    scores = logits_V.astype(np.float64) / params.temperature
    probs = softmax(scores)
    scores[probs < params.min_p * probs.max()] = -np.inf
    if params.top_k:
        scores[scores < np.sort(scores)[::-1][min(params.top_k, V) - 1]] = -np.inf
    probs = softmax(scores)
    kept, mass = [], 0.0
    for token_id in sorted(range(V), key=lambda token_id: (-probs[token_id], token_id)):
        if mass < params.top_p:
            kept.append(token_id)
        mass += probs[token_id]
    probs[[token_id for token_id in range(V) if token_id not in kept]] = 0
    target, mass = uniform(request, position) * probs.sum(), 0.0
    for token_id in range(V):
        mass += probs[token_id]
        if mass > target:
            return token_id
    raise AssertionError((mass, target))


def softmax(scores: np.ndarray) -> np.ndarray:
    exps = np.exp(scores - scores.max())
    return exps / exps.sum()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    rows=st.lists(
        st.tuples(
            st.floats(0.05, 5), st.floats(0.01, 1), st.integers(0, V + 5), st.sampled_from([0.0, 0.01, 0.2, 1.0])
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_a_batch_draws_what_the_plain_reference_draws_row_by_row(
    seed: int, rows: list[tuple[float, float, int, float]]
) -> None:
    logits_NV = 3 * torch.randn(len(rows), V, generator=torch.Generator().manual_seed(seed % 2**31))
    requests = [
        make_request(str(row), temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
        for row, (temperature, top_p, top_k, min_p) in enumerate(rows)
    ]
    expected = [reference(logits_V, request, 9) for logits_V, request in zip(logits_NV.numpy(), requests, strict=True)]
    assert draw(logits_NV, *requests, position=9) == expected


def test_temperature_zero_takes_the_largest_and_the_lowest_id_on_ties() -> None:
    logits_NV = torch.zeros(2, V)
    logits_NV[0, [7, 31]] = 2.0
    assert draw(logits_NV, make_request("a"), make_request("b")) == [7, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_padded_vocabulary_never_wins(temperature: float) -> None:
    logits_NV = torch.zeros(200, V + 14)
    logits_NV[:, V:] = 100.0
    requests = [make_request(str(row), temperature=temperature, logprobs=3) for row in range(200)]
    tokens = sample(logits_NV, requests, [1] * 200, vocab_size=V)
    assert all(token.token_id < V and all(token_id < V for token_id, _ in token.top) for token in tokens)
    assert max(draw(logits_NV, *requests, vocab_size=V + 14)) >= V, "the padding would win if it counted"


def test_a_draw_depends_on_seed_id_sample_and_position_and_not_on_the_batch() -> None:
    logits_NV = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    request = make_request("a", 0, temperature=2.0, seed=1)
    others = [make_request(str(row), temperature=3.0) for row in range(5)]
    alone = [draw(logits_NV, request, position=position)[0] for position in range(40)]
    batched = [draw(logits_NV.expand(6, V), *others, request, position=position)[-1] for position in range(40)]
    assert alone == batched
    for changed in (
        make_request("b", 0, temperature=2.0, seed=1),
        make_request("a", 1, temperature=2.0, seed=1),
        make_request("a", 0, temperature=2.0, seed=2),
    ):
        assert [draw(logits_NV, changed, position=position)[0] for position in range(40)] != alone
    assert len(set(alone)) > 5, "positions draw differently"


def test_draws_follow_the_distribution() -> None:
    probs_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    requests = [make_request(str(row), temperature=1.0) for row in range(8000)]
    counts = Counter(draw(probs_V.log().expand(8000, 4), *requests, vocab_size=4))
    for token_id, prob in enumerate(probs_V.tolist()):
        assert counts[token_id] / 8000 == pytest.approx(prob, abs=5 * math.sqrt(prob * (1 - prob) / 8000))


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits_NV = torch.randn(4, V, generator=torch.Generator().manual_seed(1))
    hot = make_request("hot", temperature=1.5)
    tokens = draw(logits_NV, make_request("a"), hot, make_request("b"), make_request("c", temperature=1e-6))
    greedy = logits_NV.argmax(-1).tolist()
    assert tokens == [greedy[0], reference(logits_NV[1].numpy(), hot, 1), greedy[2], greedy[3]]


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    logits_NV = torch.randn(3, V, generator=torch.Generator().manual_seed(2))
    requests = [
        make_request("a"),
        make_request("b", temperature=3.0, top_k=1, logprobs=1),
        make_request("c", logprobs=4),
    ]
    plain, hot, greedy = sample(logits_NV, requests, [1] * 3, vocab_size=V)
    logprobs_NV = logits_NV.log_softmax(-1)
    assert plain.logprob is None and plain.top == ()
    assert hot.logprob == pytest.approx(logprobs_NV[1, hot.token_id].item()) and len(hot.top) == 1
    assert [token_id for token_id, _ in greedy.top] == logits_NV[2].topk(4).indices.tolist()
    assert [value for _, value in greedy.top] == pytest.approx(logprobs_NV[2].topk(4).values.tolist())


def test_no_rows_draw_no_tokens() -> None:
    assert sample(torch.empty(0, V), [], [], vocab_size=V) == []


def test_an_extreme_spread_draws_only_what_has_probability() -> None:
    logits_NV = torch.full((300, V), -1e30)
    logits_NV[:, V // 2] = 1e30
    requests = [make_request(str(row), temperature=0.01, top_p=1.0) for row in range(300)]
    assert set(draw(logits_NV, *requests)) == {V // 2}


@pytest.mark.parametrize("value,token_id", [(0.0, 1), (1 - 2**-53, 2)])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_probability(
    monkeypatch: pytest.MonkeyPatch, value: float, token_id: int
) -> None:
    monkeypatch.setattr("afd_megatron.engine.sampler.uniform", lambda request, position: value)
    logits_NV = torch.tensor([[-torch.inf, 0.3, 0.7, -torch.inf]])
    assert draw(logits_NV, make_request(temperature=1.0), vocab_size=4) == [token_id]
