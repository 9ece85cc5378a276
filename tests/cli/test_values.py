"""What values mean, spelled out by hand, and which are refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamamg.options.option import OptionError
from llamamg.request import RANDOM_SEED

MEANINGS = [
    ("-ngl 99", "model.n_gpu_layers", 99),
    ("-ngl all", "model.n_gpu_layers", "all"),
    ("-ngl -1", "model.n_gpu_layers", "auto"),
    ("-ts 0.85,1,1/2", "model.tensor_split", (0.85, 1.0, 1.0, 2.0)),
    ("-ts auto", "model.tensor_split", "auto"),
    ("-dev none", "model.devices", ()),
    ("-dev CUDA0,CUDA1", "model.devices", ("CUDA0", "CUDA1")),
    (r"-ot blk\.\d+\.x=CPU,y=CUDA1", "model.override_tensor", ((r"blk\.\d+\.x", "CPU"), ("y", "CUDA1"))),
    ("-ot a=CPU -ot b=CUDA0", "model.override_tensor", (("a", "CPU"), ("b", "CUDA0"))),
    ("--override-kv a.b=int:3,c=str:x", "model.override_kv", (("a.b", "int", "3"), ("c", "str", "x"))),
    ("-np 5", "context.n_parallel", 5),
    ("-np -1", "context.n_parallel", -1),
    ("-fa on", "context.flash_attn", "on"),
    ("-fa 0", "context.flash_attn", "off"),
    ("-no-kvu", "context.kv_unified", False),
    ("-nkvo", "context.offload_kqv", False),
    ("--no-warmup", "context.warmup", False),
    ("-n 0", "generation.n_predict", 0),
    ("--temp 0", "generation.sampling.temperature", 0.0),
    ("-s -1", "generation.sampling.seed", RANDOM_SEED),
    ("--seed 4294967295", "generation.sampling.seed", RANDOM_SEED),
    (
        "--samplers top-k;temp;nucleus;penalties",
        "generation.sampling.samplers",
        ("top_k", "temperature", "top_p", "penalties"),
    ),
    ("--sampler-seq ekt", "generation.sampling.samplers", ("penalties", "top_k", "temperature")),
    ("-l 15043+1 -l 7-inf", "generation.sampling.logit_bias", ((15043, 1.0), (7, float("-inf")))),
    (r"--dry-sequence-breaker \n --dry-sequence-breaker ;", "generation.sampling.dry_sequence_breakers", ("\n", ";")),
    (r"--no-escape --dry-sequence-breaker \n", "generation.sampling.dry_sequence_breakers", (r"\n",)),
    (r"--dry-sequence-breaker ; --dry-sequence-breaker none", "generation.sampling.dry_sequence_breakers", ()),
    ("--reasoning off", "generation.chat_template_kwargs", {"enable_thinking": False}),
    ("--reasoning auto", "generation.chat_template_kwargs", {}),
    (
        "--reasoning-effort low -rea on",
        "generation.chat_template_kwargs",
        {"reasoning_effort": "low", "enable_thinking": True},
    ),
    ("--no-reasoning-preserve", "generation.chat_template_kwargs", {"preserve_reasoning": False}),
    ("--api-key a,b --api-key c", "server.api_keys", ("a", "b", "c")),
    ("-a first,second", "server.alias", ("first", "second")),
    ("-v", "server.log_level", 5),
    ("--native-switch a=1 --native-switch b=off", "native_switches", {"a": True, "b": False}),
    ("--build somewhere", "build", Path("somewhere")),
    ("--enable a,b", "plugins.enable", ("a", "b")),
    ("--enable auto,a", "plugins.enable", ("a",)),
    ("--enable only:a,b", "plugins.only", True),
    ("--enable none", "plugins.none", True),
    ("--no-seq-compact", "plugins.disable", ("seq-compact",)),
    ("--seq-compact --no-seq-compact --seq-compact", "plugins.enable", ("seq-compact",)),
    ("--plugin-option prefill-gate.max_partial=2", "plugins.options", {"prefill-gate": {"max-partial": "2"}}),
    ("--prefill-max-partial 2", "plugins.options", {"prefill-gate": {"max-partial": "2"}}),
    ("--cache-ram 0", "plugins.options", {"async-cache": {"ram": "0"}}),
    ("--spec-type none", "plugins.options", {"spec": {"type": "none"}}),
]


def field(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("line", "name", "value"), MEANINGS, ids=[line for line, _, _ in MEANINGS])
def test_meaning(line: str, name: str, value: Any, start: Any) -> None:
    assert field(start(*line.split()), name) == value


REFUSALS = [
    ("--port 70000", "at most 65535"),
    ("--port x", "whole number"),
    ("-c -5", "at least 0"),
    ("-np 0", "at least 1, or -1"),
    ("-b 0", "at least 1"),
    ("-t -2", "at least -1"),
    ("-ctk q9_9", "must be one of f32, f16"),
    ("-ctv q8_0 -fa off", "needs flash attention"),
    ("-fa maybe", "on, off or auto"),
    ("-sm both", "none, layer, row, tensor"),
    ("-ts 1,a", "separated by commas"),
    ("-ts 0,0", "above zero"),
    ("-ts 1,2,3 -dev CUDA0,CUDA1", "3 parts for 2 devices"),
    ("-ngl many", "auto or all"),
    ("-ot nothing", "PATTERN=BUFFER"),
    ("-ot (=CPU", "no regular expression"),
    ("-ot a=C&PU", "which no device can have"),
    ("--override-kv a=long:3", "KEY=TYPE:VALUE"),
    ("--override-kv a=int:x", "not of type int"),
    ("--temp nan", "finite"),
    ("--temp -1", "at least 0"),
    ("--repeat-penalty 0", "greater than 0"),
    ("--samplers top_k;best", "names the sampler 'best'"),
    ("--sampler-seq kz", "has the letter 'z'"),
    ("-s 4294967296", "to 4294967295"),
    ("-l 5", "TOKEN+BIAS"),
    ("--mirostat 3", "at most 2"),
    ("--grammar-file none.gbnf", "there is none at 'none.gbnf'"),
    ("-j {", "JSON schema"),
    ("--chat-template-kwargs [1]", "JSON object"),
    ("--api-key-file none.txt", "there is none at 'none.txt'"),
    ("--host ,", "at least one"),
    ("--api-prefix llm", "start with a slash"),
    ("--path nowhere", "folder that exists"),
    ("--slot-save-path=", "folder that exists"),
    ("--ssl-key-file some", "must be a file"),
    ("--native-switch x", "NAME=0 or NAME=1"),
    ("--plugin-option x=1", "PLUGIN.OPTION=VALUE"),
    ("--prefill-max-partial two", "whole number"),
    ("--enable only:", "needs names"),
    ("-c", "needs a value"),
    ("-c -ngl 4", "needs a value"),
    ("--metrics=1", "takes no value"),
    ("model.gguf", "unexpected argument"),
    ("--ctx-sise 5", "did you mean --ctx-size?"),
    ("--ngl 5", "unknown option --ngl"),
    ("--no-mmap", "use --load-mode"),
]


@pytest.mark.parametrize(("line", "words"), REFUSALS, ids=[line for line, _ in REFUSALS])
def test_refusal(line: str, words: str, start: Any) -> None:
    with pytest.raises(OptionError) as refused:
        start(*line.split())
    sentence = str(refused.value)
    assert words in sentence
    assert "\n" not in sentence


def test_files_are_read(start: Any, tmp_path: Path) -> None:
    keys, grammar, template = (tmp_path / name for name in ("keys", "grammar", "template"))
    keys.write_text("# comment\none\n\ntwo\n")
    grammar.write_text('root ::= "a"')
    template.write_text("{{ messages }}")
    config = start("--api-key-file", str(keys), "--grammar-file", str(grammar), "--chat-template-file", str(template))
    assert config.server.api_keys == ("one", "two")
    assert config.generation.sampling.grammar == 'root ::= "a"'
    assert config.generation.chat_template == "{{ messages }}"


def test_json_schema_waits_for_the_converter(start: Any, tmp_path: Path) -> None:
    schema = tmp_path / "schema"
    schema.write_text('{"type": "object"}')
    for arguments in (["-jf", str(schema)], ["-j", '{"type": "object"}']):
        assert start(*arguments).generation.sampling.grammar == ""
        assert start.json_schema == '{"type": "object"}'
    with pytest.raises(OptionError, match="exclude each other"):
        start("-j", "{}", "--grammar", "x")


def test_key_file_without_keys_is_refused(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# nothing\n")
    with pytest.raises(OptionError, match="holds no key"):
        start("--api-key-file", str(keys))


def test_https_needs_both_files(start: Any, tmp_path: Path) -> None:
    pem = tmp_path / "some.pem"
    pem.write_text("")
    with pytest.raises(OptionError, match="needs both"):
        start("--ssl-key-file", str(pem))
    assert start("--ssl-key-file", str(pem), "--ssl-cert-file", str(pem)).server.ssl_key_file == pem


def test_ubatch_is_clamped_and_said(start: Any) -> None:
    assert start("-b", "256").context.n_ubatch == 256
    assert any("--ubatch-size 512 is larger" in note for note in start.notes)


def test_options_without_effect_are_said(start: Any) -> None:
    start("--threads-http", "8", "--offline", env={"LLAMA_ARG_CTX_SISE": "5"})
    assert any("--threads-http has no effect" in note for note in start.notes)
    assert any("--offline has no effect" in note for note in start.notes)
    assert any("did you mean LLAMA_ARG_CTX_SIZE?" in note for note in start.notes)


def test_a_model_is_needed(start: Any) -> None:
    with pytest.raises(OptionError, match="no model: give a GGUF file with -m FILE"):
        start(model=False)
