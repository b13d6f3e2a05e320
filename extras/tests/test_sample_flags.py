"""The flags that extras adds to sample.py: those that contradict each other, and files that only extras can read."""

import pytest

from helpers import assert_one_line, here, sample, save_model, tiny


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--engine", "onnx", "--weights", "int8"], ["--weights", "--engine torch"]),
        (["--no-kv_cache", "--draft", "ngram"], ["--draft", "need the cache"]),
        (["--explain", "--draft", "ngram"], ["--explain"]),
        (["--explain", "--no-kv_cache"], ["--explain"]),
        (["--explain", "--num_samples", "2"], ["--explain"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_flags_that_contradict_each_other_are_one_line_and_exit_code_2(flags, words):
    result = here(*flags, script="sample.py")
    assert_one_line(result, *words, code=2)
    assert result.stdout == ""


def test_a_folder_of_gpt2_that_is_missing_is_one_line_that_downloads_it():
    words = "no checkpoint at gpt2-xl", "hf download openai-community/gpt2-xl"
    assert_one_line(here("--ckpt", "gpt2-xl", script="sample.py"), *words, code=1)


def test_prompts_of_different_lengths_need_the_cache(tmp_path):
    save_model(tmp_path, tiny())
    flags = ["--no-kv_cache", "--prompt", "a", "--prompt", "ab"]
    assert_one_line(sample(tmp_path, *flags), "--no-kv_cache needs prompts of equal length", code=1)


def test_the_onnx_engine_says_how_to_export_this_model(tmp_path):
    save_model(tmp_path, tiny())
    hint = f"python -m extras.export --format onnx --out_dir {tmp_path} writes one"
    assert_one_line(sample(tmp_path, "--engine", "onnx"), "no ONNX model", hint, code=1)
    result = here("--engine", "onnx", "--ckpt", tmp_path / "ckpt.pt", script="sample.py")
    assert_one_line(
        result, "ckpt.pt is a checkpoint", f"--format onnx --ckpt {tmp_path / 'ckpt.pt'} writes one", code=1
    )
