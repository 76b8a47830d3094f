"""The trained pipeline draws the digits it is asked for, and the score cannot be had by blur or by drawing one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from torch import Tensor
from torch.nn import functional as F

from purlin_diffusion import pipelines
from purlin_diffusion.score import as_tensor, score

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = [digit for digit in range(10) for _ in range(6)]
attend = F.scaled_dot_product_attention


def prompts() -> list[str]:
    ways = ("digit {word}", "a handwritten {word}", "{number}", "digit {number}", "Draw the number {word}.", "{word}")
    return [ways[i % len(ways)].format(word=WORDS[digit], number=digit) for i, digit in enumerate(DIGITS)]


def draw(pipe: Any, prompts: Sequence[str], *, seed: int = 0, **changes: Any) -> Tensor:
    """n x 1 x 32 x 32 in 0..1."""
    call = {**pipelines.defaults("digits"), **changes}
    call["negative_prompt"] = [call["negative_prompt"]] * len(prompts)
    images = pipe(list(prompts), generator=torch.Generator().manual_seed(seed), **call).images
    assert images[0].size == (32, 32)
    return as_tensor(images)


@pytest.fixture(scope="module")
def pipe() -> Any:
    loaded = pipelines.load("digits")
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def drawn(pipe: Any) -> Tensor:
    return draw(pipe, prompts())


def test_the_digits_are_right_and_differ(drawn: Tensor) -> None:
    result = score(drawn, DIGITS)
    assert result.accuracy >= 0.9, result
    assert 0.7 <= result.diversity <= 1.2, result


def test_the_prompt_is_what_decides(drawn: Tensor) -> None:
    assert score(drawn, [(digit + 1) % 10 for digit in DIGITS]).accuracy < 0.1


def test_without_the_keys_of_others_the_digits_are_wrong(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a sharded run that went wrong would show."""

    def attend_every_other(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Tensor:
        parity = torch.arange(query.shape[-2])[:, None] % 2 == torch.arange(key.shape[-2]) % 2
        return attend(query, key, value, **{**others, "attn_mask": parity, "is_causal": False})

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend_every_other)
    assert score(draw(pipe, prompts()), DIGITS).accuracy < 0.6


def test_one_picture_many_times_is_not_diverse(drawn: Tensor) -> None:
    same = drawn[::6].repeat_interleave(6, dim=0)
    assert score(same, DIGITS).diversity == pytest.approx(0, abs=1e-3)


def test_blur_is_less_diverse(drawn: Tensor) -> None:
    blurred = F.avg_pool2d(drawn, 7, stride=1, padding=3)
    assert score(blurred, DIGITS).diversity < 0.7 * score(drawn, DIGITS).diversity


def test_score_refuses_what_it_cannot_judge(drawn: Tensor) -> None:
    with pytest.raises(ValueError, match="one digit an image; got 3 for 2"):
        score(drawn[:2], [1, 2, 3])
    with pytest.raises(ValueError, match="comes twice"):
        score(drawn[:2], [1, 2])


def test_the_same_seed_draws_the_same_and_another_does_not(pipe: Any) -> None:
    first = draw(pipe, ["digit three"], seed=4)
    assert torch.equal(first, draw(pipe, ["digit three"], seed=4))
    assert (first - draw(pipe, ["digit three"], seed=5)).abs().max() > 0.5


def test_defaults_serve_one_prompt_and_several_images(pipe: Any) -> None:
    images = pipe("digit three", num_images_per_prompt=3, **pipelines.defaults("digits")).images
    assert [image.size for image in images] == [(32, 32)] * 3


def test_it_is_an_ordinary_diffusers_folder(pipe: Any, tmp_path: Path) -> None:
    plain = FluxPipeline.from_pretrained(pipelines.DIGITS)
    pipe.save_pretrained(tmp_path)
    for other in (plain, pipelines.load(str(tmp_path))):
        other.set_progress_bar_config(disable=True)
        assert other.transformer.dtype == torch.float32
        assert np.array_equal(draw(other, ["digit three"]), draw(pipe, ["digit three"]))


def test_it_is_worth_sharding_and_small_enough_for_git(pipe: Any) -> None:
    config = pipe.transformer.config
    latents = pipelines.defaults("digits")["height"] // pipe.vae_scale_factor
    assert (latents // 2) ** 2 == 64 and config.num_attention_heads == 4
    assert sum(file.stat().st_size for file in pipelines.DIGITS.rglob("*") if file.is_file()) < 3e6
