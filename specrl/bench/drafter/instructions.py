"""Generic instructions: chat-like prompts unrelated to the task, for a drafter that is pretrained off the task."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

from specrl.config import Config
from specrl.data.problems import Prompt, derive_seed

REQUESTS = """Explain {topic} to a ten-year-old.
Write a short story about {topic}.
What are the main advantages and drawbacks of {topic}?
Give me three tips about {topic}.
Summarise the history of {topic} in a few sentences.
Write a polite e-mail that asks a colleague about {topic}.
Why do people care about {topic}?
Compare {topic} with how it was a hundred years ago.
Write a poem of four lines about {topic}.
What should a beginner know about {topic}?""".splitlines()
TOPICS = """the ocean, electric cars, bread baking, chess, volcanoes, jazz music, remote work, coral reefs, honey bees,
public libraries, the moon, gardening, photography, vaccines, desert animals, opera, recycling, long train journeys,
learning a language, glaciers, football, the printing press, sleep, wind power, street food, museums""".replace(
    "\n", " "
).split(", ")


def instructions(config: Config, tokenizer: Any, count: int) -> list[Prompt]:
    """Return `count` prompts, as the tokenizer's chat template writes them where it has one.

    A prompt that leaves no room for a response is cut at its beginning.
    """
    room = config.model.max_length - config.sampling.max_response_tokens
    texts = [request.format(topic=topic) for request, topic in product(REQUESTS, TOPICS)]
    Random(derive_seed(config.seed, "instructions")).shuffle(texts)
    prompts = []
    for index in range(count):
        text = _render(tokenizer, texts[index % len(texts)])
        tokens = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
        prompts.append(Prompt(derive_seed("instructions", text, index), text, tokens[-room:], answer=""))
    return prompts


def _render(tokenizer: Any, text: str) -> str:
    if not tokenizer.chat_template:
        return f"{text}\n"
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
