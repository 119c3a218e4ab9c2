"""The forms in which a response states its final answer, and how it is extracted from there."""

from __future__ import annotations

import re

_OPEN, _CLOSE = "<answer>", "</answer>"
_LABELLED = re.compile(r"\banswer(?: is)?\s*:[ \t]*(\S.*)", re.IGNORECASE)


def format_answer(answer: str) -> str:
    """Return an answer as demonstrations state it, so that `extract_answer` finds it unchanged but for outer spaces."""
    return f"<answer>{answer}</answer>" if "\n" in answer else f"Answer: {answer}"


def extract_answer(response: str) -> str:
    """Return the answer that a response states.

    It is the text of the last `<answer>...</answer>`; without one it is what follows the last `Answer:` on its line,
    and without that the whole response.
    """
    stated, position = None, 0
    while (start := response.find(_OPEN, position)) >= 0 and (end := response.find(_CLOSE, start)) >= 0:
        stated, position = response[start + len(_OPEN) : end], end + len(_CLOSE)
    if stated is not None:
        return stated.strip()
    labelled = _LABELLED.findall(response)
    return str(labelled[-1] if labelled else response).strip()


def normalise(answer: str) -> str:
    """Return an answer without what cannot make it wrong: case, spacing, thousands separators and final full stops."""
    text = " ".join(answer.split()).casefold().rstrip(".").strip()
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
