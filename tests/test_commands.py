"""generate, and what it shares with latency: what it writes is what ran, and bad input ends before any rank starts."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from purlin_core.errors import StallError
from purlin_diffusion.__main__ import main
from purlin_diffusion.commands import generate, options, picture, ranks
from purlin_diffusion.commands.exits import FAILED, WRONG_INPUT, InputError

TINY = ("--device", "cpu", "--model", "tiny:flux", "--steps", "2", "--seed", "3", "--height", "48", "--width", "64")


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def read_options(*arguments: str, environment: dict[str, str] | None = None) -> options.Options:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return options.read_options(parser.parse_args(list(arguments)), environment or {})


# ---- generate --------------------------------------------------------------------------------------------------------
def test_threads_draw_what_one_rank_draws_and_the_record_says_so(tmp_path: Path) -> None:
    for count in (1, 3):
        out = tmp_path / f"{count}.png"
        assert main(["generate", *TINY, "--ranks", str(count), "--threads", "--scale", "2", "--out", str(out)]) == 0
    one, three = pixels(tmp_path / "1.png"), pixels(tmp_path / "3.png")
    assert one.shape == three.shape == (96, 128, 3)
    assert np.ptp(one) > 10
    assert abs(one - three).max() <= 1
    written = json.loads((tmp_path / "3.json").read_text())
    assert (written["ranks"], written["mode"], written["pixels"]) == (3, "threads", [64, 48])
    assert written["route"].startswith("purlin")
    assert len(written["seconds"]["steps"]) == 1
    assert written["seconds"]["whole"] > written["seconds"]["step"] > 0
    image_tokens = 2 * (48 // 16) * (64 // 16)  # two steps
    assert sum(tokens["image"] for tokens in written["tokens"]) == image_tokens
    assert len(written["sent_bytes"]) == 3
    assert min(written["sent_bytes"]) > 0


@pytest.mark.timeout(300)
def test_processes_draw_what_one_rank_draws(tmp_path: Path) -> None:
    assert main(["generate", *TINY, "--out", str(tmp_path / "one.png")]) == 0
    call = [
        sys.executable,
        "-m",
        "purlin_diffusion",
        "generate",
        *TINY,
        "--ranks",
        "2",
        "--out",
        str(tmp_path / "two.png"),
    ]
    done = subprocess.run(call, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert abs(pixels(tmp_path / "one.png") - pixels(tmp_path / "two.png")).max() <= 1
    assert done.stdout.startswith(str(tmp_path / "two.png"))
    assert "bytes exchanged" in done.stdout
    assert done.stderr.count("2/2") <= 2  # the root's bar, drawn and drawn again when it closes


def test_every_image_has_a_file_and_small_ones_are_enlarged(tmp_path: Path) -> None:
    image = Image.new("RGB", (28, 14), "red")
    names = generate.save([image, image], tmp_path / "a.png", None)
    assert names == (str(tmp_path / "a.png"), str(tmp_path / "a-2.png"))
    assert pixels(tmp_path / "a-2.png").shape == (14 * 20, 28 * 20, 3)
    generate.save([Image.new("RGB", (512, 256))], tmp_path / "b.png", None)
    assert pixels(tmp_path / "b.png").shape == (256, 512, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "0"], "--ranks needs 1 or more; got 0"),
        (["--ranks", "17"], "1 to 16; got 17"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--steps", "0"], "--steps"),
        (["--height", "-8"], "--height"),
        (["--images", "0"], "--images"),
        (["--seed", str(10**26)], f"--seed needs 0 to {2**63 - 1}; got {10**26}"),
        (["--seed=-1"], f"--seed needs 0 to {2**63 - 1}; got -1"),
        (["--guidance", "nan"], "--guidance needs a finite number; got nan"),
        (["--guidance", "inf"], "--guidance needs a finite number; got inf"),
        (["--guidance=-inf"], "--guidance needs a finite number; got -inf"),
        (["--scale", "0"], "--scale"),
        (["--attention", "sideways"], "attention"),
        (["--attention", "ring"], "not built"),
        (["--backend", "smoke"], "backend"),
        (["--out", "picture.txt"], "ends in one of"),
        (["--out", "/proc/nowhere/picture.png"], "cannot be written"),
        (["--device", "cuda", "--ranks", "99"], "1 to 16; got 99"),
        (["--device", "cuda", "--processes", "--ranks", "16"], "a GPU a rank"),
    ],
)
def test_bad_input_ends_before_any_rank_starts(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(generate, "on_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--model", "tiny:flux", *arguments]) == WRONG_INPUT
    told = capsys.readouterr()
    assert says in told.err
    assert len(told.err.strip().splitlines()) == 1
    assert not told.out
    assert not list(tmp_path.rglob("*.png"))


def test_an_error_of_ours_is_one_line_and_any_other_is_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(error: Exception) -> None:
        def on_ranks(*_: object) -> None:
            raise error

        monkeypatch.setattr(generate, "on_ranks", on_ranks)

    call = ["generate", "--model", "tiny:flux", "--out", str(tmp_path / "x.png")]
    fails(StallError("rank 1 waited"))
    assert main(call) == FAILED
    assert capsys.readouterr().err == "generate: StallError: rank 1 waited\n"
    fails(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(call)


@pytest.mark.parametrize(
    ("model", "size", "says"),
    [
        (
            "digits",
            ["--height", "33"],
            "--height needs a multiple of 4 pixels for FluxPipeline; got 33, near which is 32 or 36",
        ),
        (
            "digits",
            ["--width", "7"],
            "--width needs a multiple of 4 pixels for FluxPipeline; got 7, near which is 4 or 8",
        ),
        (
            "digits",
            ["--height", "28", "--width", "3"],
            "--width needs a multiple of 4 pixels for FluxPipeline; got 3, near which is 4",
        ),
        ("tiny:flux", ["--height", "40"], "--height needs a multiple of 16"),
        ("tiny:sd3", ["--width", "60"], "--width needs a multiple of 16"),
    ],
)
def test_a_size_that_would_be_rounded_is_refused_before_anything_is_drawn(
    model: str,
    size: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(generate, "call", lambda *_, **__: pytest.fail("a picture was drawn"))
    call = ["generate", "--device", "cpu", "--model", model, *size, "--out", str(tmp_path / "x.png")]
    assert main(call) == WRONG_INPUT
    told = capsys.readouterr()
    assert says in told.err
    assert len(told.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["digits", "tiny:flux", "tiny:sd3"])
def test_a_size_that_is_not_refused_is_the_size_of_the_picture(model: str) -> None:
    chosen = read_options("--device", "cpu", "--model", model, "--steps", "1")
    pipe = picture.load(chosen, "cpu")
    side = options.size_multiple(pipe)
    arguments = {**picture.call_arguments(chosen), "height": side, "width": 2 * side}
    options.check_size(pipe, arguments)
    images, _ = picture.call(pipe, arguments, seed=0)
    assert images[0].size == (2 * side, side)


def test_what_a_pipeline_refuses_is_one_line() -> None:
    chosen = read_options("--device", "cpu", "--model", "tiny:sd3", "--height", "60")
    with pytest.raises(
        InputError, match=r"^StableDiffusion3Pipeline: `height` and `width` have to be divisible by 16"
    ) as told:
        picture.call(picture.load(chosen, "cpu"), picture.call_arguments(chosen), seed=0)
    assert len(str(told.value).splitlines()) == 1


def test_a_value_error_that_is_not_diffusers_own_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="glue") as caught, picture.refusals_in_one_line(object()):
        raise ValueError("glue")
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("gpus", "built", "arguments", "mode", "places"),
    [
        (0, True, [], "processes", ["cpu"] * 3),
        (1, True, [], "threads", ["cuda:0"] * 3),
        (1, True, ["--threads"], "threads", ["cuda:0"] * 3),
        (1, True, ["--processes"], "processes", ["cpu"] * 3),
        (1, True, ["--device", "cpu"], "processes", ["cpu"] * 3),
        (1, False, [], "processes", ["cpu"] * 3),
        (1, False, ["--device", "cuda"], "threads", ["cuda:0"] * 3),
        (2, True, ["--device", "cuda"], "threads", ["cuda:0"] * 3),
        (3, True, [], "processes", ["cuda:0", "cuda:1", "cuda:2"]),
        (4, False, ["--threads"], "threads", ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_ranks_have_a_gpu_each_or_share_one_as_threads(
    gpus: int, built: bool, arguments: list[str], mode: str, places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (options, ranks):
        monkeypatch.setattr(module, "gpus", lambda: gpus)
    monkeypatch.setattr(options, "find_spec", lambda _: built or None)
    chosen = read_options("--model", "tiny:flux", "--ranks", "3", *arguments)
    assert chosen.mode == mode
    assert ranks.places(chosen) == places
    assert ranks.sharing(chosen).startswith("3 ranks share cuda:0") == (places == ["cuda:0"] * 3)


def test_a_launcher_says_how_many_ranks_there_are() -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "4"}
    assert read_options("--model", "tiny:flux", environment=launched).ranks == 4
    assert read_options("--model", "tiny:flux", environment=launched).mode == "launched"
    assert ranks.on_ranks(lambda o: o.ranks, read_options("--model", "tiny:flux")) == [1]
    for wrong in (["--ranks", "2"], ["--threads"]):
        with pytest.raises(InputError, match="4 ranks"):
            read_options("--model", "tiny:flux", *wrong, environment=launched)
