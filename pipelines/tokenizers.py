"""Tokenizers made from a list of words: no files, no hub. Any text is tolerated; a listed word is one token."""

from __future__ import annotations

import string
from collections.abc import Iterable

from transformers import AddedToken, CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

START, END = "<|startoftext|>", "<|endoftext|>"


def clip(words: Iterable[str] = (), *, length: int = 77, pad: str = END) -> CLIPTokenizer:
    """Byte-level BPE as CLIP has it (lower case); each of `words` (ASCII letters) is merged into one token.

    `length` is the number of tokens every prompt is padded or cut to, `pad` the padding token (SD3's second one is "!").
    """
    merges = list(dict.fromkeys(merge for word in words for merge in _merges(word.lower())))
    letters = list(_byte_letters())
    tokens = letters + [letter + "</w>" for letter in letters] + [a + b for a, b in merges] + [START, END]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*tokens, pad]))}
    return CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad, model_max_length=length)


def t5(words: Iterable[str] = (), *, length: int = 512) -> T5Tokenizer:
    """Unigram as T5 has it (cased); each of `words` is one token with its leading space, other text is letters.

    `length` only bounds what the tokenizer allows: a pipeline pads to its own `max_sequence_length`.
    """
    letters = string.ascii_letters + string.digits + string.punctuation
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [("\u2581" + word, -1.0) for word in dict.fromkeys(words)]
    pieces += [(letter, -5.0) for letter in letters]
    return T5Tokenizer(vocab=pieces, extra_ids=0, additional_special_tokens=[], model_max_length=length)


def qwen2(words: Iterable[str] = (), *, length: int = 1024) -> Qwen2Tokenizer:
    """Bytes, as Qwen2 falls back to them, with the two marks of a turn; each of `words` is one token wherever it stands, a space in it too."""
    tokens = [*_byte_letters(), "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], model_max_length=length)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def _merges(word: str) -> list[tuple[str, str]]:
    """The merges that build `word` from left to right: ("t", "h"), ("th", "r"), ..., ("thre", "e</w>")."""
    ends = [*word[:-1], word[-1:] + "</w>"]
    return [(word[:i], ends[i]) for i in range(1, len(word))]


def _byte_letters() -> Iterable[str]:
    """A printable letter for each of the 256 bytes, as GPT-2's byte-level BPE chose them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return [chr(byte) for byte in printable] + [chr(256 + n) for n, _ in enumerate(others)]
