"""How a final answer is stated in a response, and read back from it."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LABELLED = re.compile(r"\banswer(?: is)?\s*:[ \t]*(\S.*)", re.IGNORECASE)


def state_answer(answer: str) -> str:
    """The form in which demonstrations state an answer; `stated_answer` reads it back unchanged."""
    return f"<answer>{answer}</answer>" if "\n" in answer else f"Answer: {answer}"


def stated_answer(response: str) -> str:
    """The last `<answer>...</answer>`, else what follows the last `Answer:` on its line, else the whole response."""
    tagged = _TAGGED.findall(response)
    if tagged:
        return str(tagged[-1]).strip()
    labelled = _LABELLED.findall(response)
    return str(labelled[-1] if labelled else response).strip()


def normalise(answer: str) -> str:
    """Case, spacing, thousands separators and a final full stop do not make an answer wrong."""
    text = " ".join(answer.split()).casefold().rstrip(".").strip()
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
