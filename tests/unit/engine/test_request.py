import json

import pytest

from afd_megatron.engine.balance import choose_rank
from afd_megatron.engine.request import FinishReason, Request, Result, SampledToken, SamplingParams

RESULT = Result(
    id="ünï\ncode\u2028",
    sample=1,
    finish_reason=FinishReason.STOP,
    text="a\nb 🙂",
    token_ids=(4, 5),
    num_prompt_tokens=3,
    logprobs=(SampledToken(4, -0.25, ((4, -0.25), (7, -2.0))), SampledToken(5, -0.5)),
    ttft_s=0.1,
    itl_s=(0.2,),
    e2e_s=0.3,
)


@pytest.mark.parametrize(
    "request_",
    [
        Request("a", 0, (1, 2, 3), SamplingParams()),
        Request("ü\r\n\u2028", 3, (5,), SamplingParams(0.7, 0.9, 40, 0.1, 12, 2**63 - 1, 5, True, ("\n", "é")), 1.25),
    ],
)
def test_a_request_is_the_same_after_the_wire_and_one_line_on_it(request_: Request) -> None:
    data = request_.to_bytes()
    assert Request.from_bytes(data) == request_ and len(data.splitlines()) == 1


@pytest.mark.parametrize("result", [RESULT, Result("a", 0, FinishReason.ERROR, error="line 3: no")])
def test_a_result_is_the_same_after_the_wire_and_one_line_on_it(result: Result) -> None:
    data = result.to_bytes()
    assert Result.from_bytes(data) == result and len(data.splitlines()) == 1


def test_the_record_of_a_result_holds_what_the_output_promises() -> None:
    assert json.loads(json.dumps(RESULT.record())) == {
        "id": RESULT.id,
        "sample": 1,
        "text": "a\nb 🙂",
        "token_ids": [4, 5],
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "num_tokens": 2,
        "logprobs": [
            {
                "token_id": 4,
                "logprob": -0.25,
                "top": [{"token_id": 4, "logprob": -0.25}, {"token_id": 7, "logprob": -2.0}],
            },
            {"token_id": 5, "logprob": -0.5, "top": []},
        ],
        "error": None,
    }


@pytest.mark.parametrize("loads,rank", [((5,), 0), ((3, 1, 2), 1), ((2, 1, 1), 1), ((0, 0), 0)])
def test_a_request_goes_to_the_least_loaded_rank_and_the_lowest_of_equals(loads: tuple[int, ...], rank: int) -> None:
    assert choose_rank(loads) == rank
