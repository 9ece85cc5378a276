"""Command line over environment over config file, and the fork's production command."""

from __future__ import annotations

from typing import Any

import pytest

from llamamg.options.option import OptionError

FILE = """
[serve]
ctx-size = 100
batch_size = 300
temp = 0.5
tensor-split = [0.85, 1, 1]
api-key = ["a", "b"]
override-tensor = ["x=CPU", "y=CUDA0"]
chat-template-kwargs = { depth = 3 }
no-warmup = true

[plugins.prefill-gate]
enabled = true
max-partial = 3

[plugins.seq-compact]
enabled = false
"""


def test_file_is_read(start: Any) -> None:
    config = start(file=FILE)
    assert (config.context.n_ctx, config.context.n_batch, config.context.warmup) == (100, 300, False)
    assert config.generation.sampling.temperature == 0.5
    assert config.model.tensor_split == (0.85, 1.0, 1.0)
    assert config.model.override_tensor == (("x", "CPU"), ("y", "CUDA0"))
    assert config.server.api_keys == ("a", "b")
    assert config.generation.chat_template_kwargs == {"depth": 3}
    assert config.plugins.enable == ("prefill-gate",)
    assert config.plugins.disable == ("seq-compact",)
    assert config.plugins.options == {"prefill-gate": {"max-partial": "3"}}


def test_environment_beats_file_and_command_line_beats_both(start: Any) -> None:
    env = {"LLAMA_ARG_CTX_SIZE": "200", "LLAMA_ARG_BATCH": "400", "LLAMA_API_KEY": "c"}
    config = start("-c", "900", env=env, file=FILE)
    assert (config.context.n_ctx, config.context.n_batch) == (900, 400)
    assert config.generation.sampling.temperature == 0.5
    assert config.server.api_keys == ("c",)
    assert start("--api-key", "d", env=env, file=FILE).server.api_keys == ("d",)


def test_plugins_on_the_command_line_beat_the_file(start: Any) -> None:
    config = start("--seq-compact", "--disable", "prefill-gate", "--prefill-max-partial", "7", file=FILE)
    assert config.plugins.enable == ("seq-compact",)
    assert config.plugins.disable == ("prefill-gate",)
    assert config.plugins.options == {"prefill-gate": {"max-partial": "7"}}
    by_option = start("--plugin-option", "prefill-gate.max-partial=8", "--prefill-max-partial", "7", file=FILE)
    assert by_option.plugins.options == {"prefill-gate": {"max-partial": "8"}}


def test_empty_variables_of_ours_are_unset(start: Any) -> None:
    assert start(env={"LLAMAMG_BUILD": "", "LLAMAMG_ENABLE": "", "LLAMAMG_CONFIG": ""}) == start()


def test_negative_variable_switches_off(start: Any) -> None:
    assert start(env={"LLAMA_ARG_NO_CACHE_PROMPT": "1"}).generation.cache_prompt is False
    assert start("--cache-prompt", env={"LLAMA_ARG_NO_CACHE_PROMPT": "1"}).generation.cache_prompt is True


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("[serve\n", "not valid TOML"),
        ("[other]\nx = 1\n", "unknown table or key 'other'"),
        ("[serve]\nctx-sise = 1\n", "did you mean --ctx-size?"),
        ("[serve]\nctx-size = 'x'\n", "must be a whole number"),
        ("[serve]\nmetrics = 'yes'\n", "must be true or false"),
        ("[serve]\nctx-size = 1979-05-27\n", "must be text, a number"),
        ("[serve]\nconfig = 'x'\n", "belongs on the command line"),
        ("serve = 3\n", "must be tables"),
        ("[plugins]\nx = 1\n", "must be a table"),
        ("[plugins.seq-compact]\nenabled = 'perhaps'\n", "must be true or false"),
        ("[serve]\nlora = 'x'\n", "is not supported"),
    ],
)
def test_bad_file(file: str, words: str, start: Any) -> None:
    with pytest.raises(OptionError) as refused:
        start(file=file)
    assert words in str(refused.value)


def test_missing_file(start: Any) -> None:
    with pytest.raises(OptionError, match=r"there is no file nowhere\.toml"):
        start("--config", "nowhere.toml")


# The command and the environment that the multi-GPU fork documents for production.
PRODUCTION = r"""
    -m Qwen3.8-Flash-Next-UD-Q4_K_XL-00001-of-00004.gguf
    -ngl 99 -sm layer -fa on -np 5 -c 1310720
    --cache-type-k q8_0 --cache-type-v q8_0 -b 2048 -ub 512
    -ot per_layer_token_embd\.weight=CPU --tensor-split 0.85,1,1,1,1,1
    --prefill-max-partial 2 --cache-ram 81920
    --spec-type ngram-map-k4v
"""
ENVIRONMENT = {
    "LLAMA_DECODE_PIPELINE": "1",
    "LLAMA_SERVER_GROUPS": "5",
    "LLAMA_PIPELINE_PARALLEL": "1",
    "GGML_CUDA_GRAPHS_FORCE": "1",
    "LLAMA_ATTN_ROT_DISABLE": "1",
    "LLAMA_SERVER_SPEC_MAX_USERS": "2",
    "LLAMA_QSA_BIAS_DEVICE": "1",
    "LLAMA_KQ_MASK_DEVICE": "1",
}


def test_production_command_parses_fully(start: Any) -> None:
    config = start(*PRODUCTION.split(), "--ignore-missing-plugins", env=ENVIRONMENT)
    assert [note.split()[0] for note in start.notes] == [
        "GGML_CUDA_GRAPHS_FORCE",
        "LLAMA_QSA_BIAS_DEVICE",
        "LLAMA_KQ_MASK_DEVICE",
    ]
    assert (config.model.n_gpu_layers, config.model.split_mode) == (99, "layer")
    assert config.model.override_tensor == ((r"per_layer_token_embd\.weight", "CPU"),)
    assert config.model.tensor_split == (0.85, 1, 1, 1, 1, 1)
    context = config.context
    assert (context.n_ctx, context.n_parallel, context.n_batch, context.n_ubatch) == (1310720, 5, 2048, 512)
    assert (context.cache_type_k, context.cache_type_v, context.flash_attn) == ("q8_0", "q8_0", "on")
    assert config.native_switches == {"pipeline-parallel": True}
    assert config.plugins.ignore_missing
    assert config.plugins.options == {
        "prefill-gate": {"max-partial": "2"},
        "async-cache": {"ram": "81920"},
        "spec": {"type": "ngram-map-k4v", "max-users": "2"},
        "decode-groups": {"groups": "5", "pipeline": "1"},
    }


@pytest.mark.parametrize(
    ("line", "env", "words"),
    [
        ("--plugin-option mine.x=1", {}, "mine needs the plugin mine"),
    ],
)
def test_option_of_a_missing_plugin_stops(line: str, env: dict[str, str], words: str, start: Any) -> None:
    with pytest.raises(OptionError) as stopped:
        start(*line.split(), env=env)
    assert words in str(stopped.value)
    assert "--ignore-missing-plugins" in str(stopped.value)


def test_switches_of_a_plugin_are_given_as_in_llama_server(start: Any) -> None:
    assert start("--no-cache-idle-slots").plugins.options == {"async-cache": {"idle-slots": "off"}}
    on = {"async-cache": {"idle-slots": "on"}}
    assert start("--cache-idle-slots", env={"LLAMA_ARG_CACHE_IDLE_SLOTS": "0"}).plugins.options == on
    assert start("--async-cache-idle-slots", "on").plugins.options == on
