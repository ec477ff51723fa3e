"""What a job file may say, and what is said about one that may not."""

import ast
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afd_megatron.config import NOT_YET, JobConfig, SamplingConfig, dump_config, load_config
from afd_megatron.config.schema import Section, schema_keys
from afd_megatron.errors import ConfigError

JOB = """\
model:
  path: model
topology:
  attention: {dp: 2}
  ffn: {ep: 2}
job:
  input: in.jsonl
  output: out.jsonl
"""

Load = Callable[..., JobConfig]
Faults = Callable[..., list[str]]
LONG = "x" * 241


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with all that JOB names."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "in.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Load:
    def load_text(text: str | bytes = JOB, overrides: Sequence[str] = ()) -> JobConfig:
        (folder / "x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(Path("x.yaml"), overrides)

    return load_text


@pytest.fixture
def faults(load: Load) -> Faults:
    def faults_of(text: str | bytes = JOB, overrides: Sequence[str] = ()) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, overrides)
        return str(caught.value).splitlines()

    return faults_of


def test_three_required_keys_make_a_job(load: Load) -> None:
    config = load("model: {path: model}\njob: {input: in.jsonl, output: out.jsonl}\n")
    assert (config.topology.attention.dp, config.topology.ffn.ep, config.connector.kind) == (1, 1, "gloo")


@pytest.mark.parametrize(
    ("line", "rest", "fault"),
    [
        ("\n  path: model", " {}", "x.yaml:1: model.path: is required"),
        ("  input: in.jsonl\n", "", "x.yaml:6: job.input: is required"),
        ("  output: out.jsonl\n", "", "x.yaml:6: job.output: is required"),
    ],
)
def test_each_required_key_is_missed_by_name(faults: Faults, line: str, rest: str, fault: str) -> None:
    assert faults(JOB.replace(line, rest)) == [fault]


def test_missing_sections_are_named_down_to_the_key(faults: Faults) -> None:
    assert faults("topology: {}\n") == [
        "x.yaml: model.path: is required",
        "x.yaml: job.input: is required",
        "x.yaml: job.output: is required",
    ]


def test_every_fault_is_told_at_once_with_its_line(faults: Faults) -> None:
    text = """\
model: {path: model, laod: hf}
topology:
  attention: {dp: two}
  ffn: {ep: 2}
  colocated: yes
connector: {kind: glo}
sampling: {top_p: 1.5, stop: [a, 3]}
job:
  input: nowhere.jsonl
  output: nowhere/out.jsonl
launch: {restarts: 2}
pipelin: {}
control: {heartbeat_interval_s: 7}
"""
    assert sorted(faults(text)) == sorted(
        [
            "x.yaml:1: model.laod: unknown key (did you mean load? allowed: path, load, dtype, seed)",
            'x.yaml:3: topology.attention.dp: "two" should be a valid integer',
            'x.yaml:5: topology.colocated: "yes" should be a valid boolean',
            'x.yaml:6: connector.kind: "glo" is unknown (did you mean gloo? allowed: local, gloo)',
            "x.yaml:7: sampling.top_p: 1.5 should be less than or equal to 1",
            "x.yaml:7: sampling.stop.1: 3 should be a valid string",
            "x.yaml:9: job.input: nowhere.jsonl is not a file",
            "x.yaml:10: job.output: folder nowhere does not exist",
            "x.yaml:11: launch.restarts: not yet: 2, starting again after a fault (allowed: 0)",
            f"x.yaml:12: pipelin: unknown key (did you mean pipeline? allowed: {', '.join(JobConfig.model_fields)})",
            "x.yaml:13: control.heartbeat_timeout_s: 5.0 (allowed: more than heartbeat_interval_s 7.0)",
        ]
    )


@pytest.mark.parametrize("key", sorted({key.rpartition(".")[0] for key in schema_keys()} | {""}))
def test_unknown_keys_are_refused_at_every_level(faults: Faults, key: str) -> None:
    unknown = f"{key}.zzz".strip(".")
    [line] = faults(overrides=[f"{unknown}=1"])
    assert line.startswith(f"--set {unknown}=1: {unknown}: unknown key (allowed: ")


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(faults: Faults) -> None:
    [line] = faults(JOB + "engine: {temperature: 1}\n")
    assert line.startswith("x.yaml:9: engine.temperature: unknown key (did you mean sampling.temperature? ")


def test_a_key_written_with_dots_is_unknown_and_not_split(faults: Faults) -> None:
    [line] = faults(JOB + "pipeline.stages: 3\n")
    assert line.startswith("x.yaml:9: pipeline.stages: unknown key")


@pytest.mark.parametrize("key", sorted(schema_keys()))
def test_a_mapping_in_place_of_a_value_is_refused_at_every_key(faults: Faults, key: str) -> None:
    assert any(line.startswith(f"--set {key}={{a: 1}}: {key}") for line in faults(overrides=[f"{key}={{a: 1}}"]))


@pytest.mark.parametrize("section", sorted(JobConfig.model_fields))
@pytest.mark.parametrize("value", ["null", "3", "[1]", "text"])
def test_a_section_that_is_no_mapping_is_refused(faults: Faults, section: str, value: str) -> None:
    assert any(
        f": {section}: " in line and "should be a mapping" in line for line in faults(overrides=[f"{section}={value}"])
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("topology.attention.dp=0", "0 should be greater than or equal to 1"),
        ("topology.ffn.ep=true", "true should be a valid integer"),
        ("topology.ffn.ep=2.0", "2.0 should be a valid integer"),
        ("pipeline.stages=0", "0 should be greater than or equal to 1"),
        ("engine.prefill_chunk=0", "0 should be greater than or equal to 1"),
        ("engine.kv_blocks=0", "0 should be greater than or equal to 1"),
        ("graphs.enabled=1", "1 should be a valid boolean"),
        ("sampling.temperature=-0.1", "-0.1 should be greater than or equal to 0"),
        ("sampling.temperature=1e999", "Infinity should be a finite number"),
        ("sampling.top_p=0", "0 should be greater than 0"),
        ("sampling.max_new_tokens=-1", "-1 should be greater than or equal to 0"),
        ("sampling.seed=-1", "-1 should be greater than or equal to 0"),
        ("sampling.stop=['']", '"" should have at least 1 character'),
        ("sampling.stop=text", '"text" should be a valid tuple'),
        ("job.request_rate=0", "0 should be greater than 0"),
        ("job.input=3", "3 should be a path"),
        ("control.step_timeout_s=0", "0 should be greater than 0"),
        ("launch.threads.attention=0", "0 should be greater than or equal to 1"),
        ("model.dtype=fp32", '"fp32" is unknown (allowed: float32, bfloat16)'),
    ],
)
def test_values_out_of_range_or_type_are_refused(faults: Faults, override: str, message: str) -> None:
    assert any(message in line and line.startswith(f"--set {override}: ") for line in faults(overrides=[override]))


@pytest.mark.parametrize("override", ["sampling.max_new_tokens=0", "sampling.temperature=1", "job.request_rate=2"])
def test_values_on_the_edge_are_allowed(load: Load, override: str) -> None:
    load(overrides=[override])


@pytest.mark.parametrize(
    "text", ["3:2", "012", "08", "0o17", "0x1F", "1_000", "1e-5", "yes", "No", "on", ".inf", ".nan"]
)
def test_yaml_traps_do_not_become_integers(faults: Faults, text: str) -> None:
    shown = "1e-05" if text == "1e-5" else f'"{text}"'
    assert faults(JOB + f"pipeline: {{stages: {text}}}\n") == [
        f"x.yaml:9: pipeline.stages: {shown} should be a valid integer"
    ]


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "NaN", "inf", "01.5", "1:30.5", "1_0.5"])
def test_yaml_traps_do_not_become_floats(faults: Faults, text: str) -> None:
    assert faults(overrides=[f"sampling.temperature={text}"]) == [
        f'--set sampling.temperature={text}: sampling.temperature: "{text}" should be a valid number'
    ]


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1E1", 10.0), (".5", 0.5), ("1.", 1.0), ("+2", 2.0)])
def test_numbers_are_numbers(load: Load, text: str, value: float) -> None:
    assert load(overrides=[f"sampling.temperature={text}"]).sampling.temperature == value


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "y", "n", "2001-01-01", "12:30:45", "012", "="])
def test_yaml_traps_stay_text_where_text_is_wanted(load: Load, text: str) -> None:
    assert load(JOB + f"sampling: {{stop: [{text}]}}\n").sampling.stop == (text,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml: no mapping at the top"),
        ("# nothing\n", "x.yaml: no mapping at the top"),
        ("- model\n", "x.yaml: no mapping at the top"),
        ("text", "x.yaml: no mapping at the top"),
        ("model: &m {path: model}\n", "x.yaml:1: not plain YAML: anchors and aliases are not allowed"),
        ("model: *m\n", "x.yaml:1: not plain YAML: anchors and aliases are not allowed"),
        ("a: 1\nb: !!python/object:os.system x\n", "x.yaml:2: not plain YAML: tag tag:yaml.org,2002:python"),
        ("a: !!int 3\n", "x.yaml:1: not plain YAML: tag tag:yaml.org,2002:int is not allowed"),
        ("a: 1\n---\nb: 1\n", "x.yaml:2: not plain YAML: but found another document"),
        ("a: 1\n\tb: 2\n", "x.yaml:2: not plain YAML: "),
        ("a: [1\n", "x.yaml:2: not plain YAML: "),
        ("a: " + "[" * 5000, "x.yaml:1: not plain YAML: nested over 16 deep"),
        (b"a: \xff\n", "x.yaml:1: byte 0xff is not UTF-8"),
        (b"a: 1\nb: \x00\n", "x.yaml: not plain YAML: unacceptable character"),
        (b"#" * (1 << 21), "x.yaml: 2097152 bytes (allowed: up to 1048576)"),
    ],
)
def test_a_file_that_is_no_plain_yaml_is_refused_in_one_line(faults: Faults, text: str | bytes, message: str) -> None:
    [line] = faults(text)
    assert line.startswith(message)


@pytest.mark.parametrize("name", ["missing.yaml", "model"])
def test_a_path_that_cannot_be_read_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: cannot be read: "):
        load_config(Path(name), [])


def test_a_byte_order_mark_and_crlf_are_read(load: Load) -> None:
    assert load(b"\xef\xbb\xbf" + JOB.replace("\n", "\r\n").encode()) == load(JOB)


def test_repeated_keys_are_refused_with_both_lines(faults: Faults) -> None:
    text = JOB + "  output: other.jsonl\nmodel: {path: model, path: model}\n"
    assert faults(text) == [
        "x.yaml:9: job.output: repeated key (first at x.yaml:8)",
        "x.yaml:10: model: repeated key (first at x.yaml:1)",
    ]


@pytest.mark.parametrize("text", ["<<: {a: 1}", "? [a, b]\n: 1", "1: 2", "null: 2"])
def test_odd_keys_are_unknown(faults: Faults, text: str) -> None:
    assert "unknown key" in faults(JOB + text)[0]


def test_an_override_beats_the_file_and_a_later_one_an_earlier_one(load: Load) -> None:
    config = load(
        overrides=["topology.ffn.ep=3", "topology.ffn.ep=5", 'sampling.stop=["a=b", c]', "engine={block_size: 8}"]
    )
    assert (config.topology.ffn.ep, config.topology.attention.dp, config.engine.block_size) == (5, 2, 8)
    assert config.sampling.stop == ("a=b", "c")


def test_a_fault_of_an_override_is_named_as_it_was_typed(faults: Faults) -> None:
    assert faults(overrides=["topology.ffn.ep=x"]) == [
        '--set topology.ffn.ep=x: topology.ffn.ep: "x" should be a valid integer'
    ]


def test_an_override_mends_a_fault_of_the_file(load: Load) -> None:
    assert load(JOB.replace("ep: 2", "ep: x"), ["topology.ffn.ep=3"]).topology.ffn.ep == 3


@pytest.mark.parametrize("override", ["", "=", "a", "a.=1", ".a=1", "a..b=1", "=1"])
def test_an_override_without_key_or_value_is_refused(faults: Faults, override: str) -> None:
    assert faults(overrides=[override])[0].startswith(f"--set {override}: not of the form KEY=VALUE")


def test_an_override_that_is_no_yaml_is_refused(faults: Faults) -> None:
    [line] = faults(overrides=["sampling.stop=[a"])
    assert line.startswith("--set sampling.stop=[a: not plain YAML: ")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["topology.colocated=true", "topology.ffn.ep=3"],
         "--set topology.colocated=true: topology.colocated: 2 attention ranks (dp x tp) are not 3 FFN ranks (ep x tp)"
         " (allowed: equal numbers)"),
        (["connector.kind=local"],
         "--set connector.kind=local: connector.kind: local is one process, but there are 2 attention and 2 FFN ranks"
         " (allowed: 1 and 1, or kind gloo)"),
        (["topology={colocated: true}"],
         "x.yaml: connector.kind: gloo has no peer on one colocated rank (allowed: local)"),
        (["topology.colocated=true", "launch.threads.ffn=2"],
         "--set launch.threads.ffn=2: launch.threads.ffn: no effect, each rank has both roles (allowed: null)"),
        (["model.seed=1"], "--set model.seed=1: model.seed: no effect with model.load hf (allowed: 0)"),
        (["graphs.buckets=[1, 2]"],
         "--set graphs.buckets=[1, 2]: graphs.buckets: no effect with graphs.enabled false (allowed: [])"),
        (["control.heartbeat_timeout_s=1"],
         "--set control.heartbeat_timeout_s=1: control.heartbeat_timeout_s: 1.0"
         " (allowed: more than heartbeat_interval_s 1.0)"),
        (["job.output=./in.jsonl"],
         "--set job.output=./in.jsonl: job.output: in.jsonl or its summary would overwrite job.input"),
        (["job.output=model"], "--set job.output=model: job.output: model is a folder"),
        ([f"job.output={LONG}"], f"--set job.output={LONG}: job.output: a name of 241 bytes (allowed: up to 240)"),
        (["pipeline.exchange=routed"],
         "--set pipeline.exchange=routed: pipeline.exchange: routed knows no experts before the gate"
         " (allowed: pipeline.gate attention)"),
        (["job.output=x/y"], "--set job.output=x/y: job.output: folder x does not exist"),
        (["job.input=model"], "--set job.input=model: job.input: model is not a file"),
        (["model.path=nope"], "--set model.path=nope: model.path: nope has no config.json"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(faults: Faults, overrides: list[str], fault: str) -> None:
    assert faults(overrides=overrides) == [fault]


def test_buckets_must_ascend(faults: Faults) -> None:
    lines = faults(overrides=["graphs={enabled: true, buckets: [4, 2, 2]}"])
    assert lines[1].endswith("graphs.buckets: [4, 2, 2] (allowed: ascending, each once)")


def test_a_rule_is_silent_where_a_key_it_rests_on_is_broken(faults: Faults) -> None:
    lines = faults(overrides=["topology.colocated=true", "topology.ffn.ep=x"])
    assert [line.split(": ")[1] for line in lines] == ["topology.ffn.ep"]


def test_the_output_may_not_be_the_input_under_another_name(faults: Faults, folder: Path) -> None:
    (folder / "link.jsonl").symlink_to("in.jsonl")
    assert "would overwrite job.input" in faults(overrides=["job.output=link.jsonl"])[0]


@pytest.mark.parametrize(
    "override",
    ["topology.placement=spread",
     "connector.kind=nccl", "connector.kind=cuda_ipc", "connector.reply_dtype=float32",
     "graphs.enabled=true", "engine.kv_memory_fraction=0.5",
     "job.resume=true", "observe.trace=t.json", "observe.metrics_port=9000", "launch.restarts=1"],
)  # fmt: skip
def test_what_does_not_exist_yet_is_refused_by_name(faults: Faults, override: str) -> None:
    key = override.partition("=")[0]
    [line] = faults(overrides=[override])
    assert line.startswith(f"--set {override}: {key}: not yet: ") and NOT_YET[key].what in line


def test_every_default_is_something_that_exists(load: Load) -> None:
    assert set(NOT_YET) <= set(schema_keys())
    load("model: {path: model}\njob: {input: in.jsonl, output: out.jsonl}\n")


_NUMBERS = st.floats(0, 100, allow_nan=False)
_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
_SAMPLING = st.builds(
    SamplingConfig,
    temperature=_NUMBERS,
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
    stop=st.lists(_TEXTS | st.sampled_from(["1e-5", "yes", "null", "3:2", "012", "~", "- a", "a: b", "#"])).map(tuple),
    ignore_eos=st.booleans(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sampling=_SAMPLING, blocks=st.none() | st.integers(1, 1 << 30))
def test_a_printed_config_loads_to_the_same_config(load: Load, sampling: SamplingConfig, blocks: int | None) -> None:
    base = load()
    config = base.model_copy(
        update={"sampling": sampling, "engine": base.engine.model_copy(update={"kv_blocks": blocks})}
    )
    assert load(dump_config(config)) == config


def test_blocks_of_the_cache_default_to_room_for_all_requests(load: Load) -> None:
    engine = load(overrides=["engine.max_context=33", "engine.max_requests_per_rank=2"]).engine
    assert engine.num_kv_blocks == 2 * 3
    assert load(overrides=["engine.kv_blocks=7"]).engine.num_kv_blocks == 7


@pytest.mark.parametrize(
    ("output", "summary"), [("a/results.jsonl", "a/results.summary.json"), ("r", "r.summary.json")]
)
def test_the_summary_lies_beside_the_output(load: Load, folder: Path, output: str, summary: str) -> None:
    (folder / "a").mkdir()
    assert load(overrides=[f"job.output={output}"]).job.summary == Path(summary)


def test_every_setting_says_what_it_is() -> None:
    pending: list[type[Section]] = [JobConfig]
    while pending:
        for name, info in pending.pop().model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
                pending.append(info.annotation)
            else:
                assert info.description, name


def test_the_config_is_read_without_torch(folder: Path) -> None:
    code = (
        "import sys, afd_megatron.config; print(sorted({'torch', 'deepspeed', 'megatron', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval(out) == []
