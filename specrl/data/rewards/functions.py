"""Rewards: numbers that rate a response. They run in worker processes; see `rewards.pool`."""

from __future__ import annotations

import asyncio
import errno
import inspect
import math
import os
import re
import reprlib
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from pydantic import ValidationError, model_validator

from specrl.config import ConfigError, DataConfig, RewardPart
from specrl.config.algorithms import Options
from specrl.config.base import NonNegativeInt, import_function
from specrl.config.errors import explain
from specrl.data.answers import (
    after_thoughts,
    as_latex,
    contradicts,
    extract_answer,
    final_part,
    formula,
    in_order,
    is_text,
    keep_variable,
    references,
    same,
    without_lead,
)
from specrl.data.generators import make_generator
from specrl.data.problems import Prompt
from specrl.data.rewards.code import CodeParameters, run_tests
from specrl.data.rewards.judge import JudgeParameters, ask_judge
from specrl.data.scorers.expressions import NotAnAnswerError, bounded_latex

Reward = Callable[[Prompt, str], Any]  # (prompt, response) -> anything; `judge` turns it into a number
RewardFunction = Callable[..., float]  # (prompt, response, answer) -> reward; any parameters come last

ROUNDING = 0.05  # relative, of a number stated with two digits
MATH_VERIFY_SECONDS = 5  # seconds per step of a comparison
DIGITS, EXACT_DIGITS = 15, 2500  # digits to which expressions are compared: with decimals or sums, and exact
LARGEST = 3.4e38  # rollouts keep rewards in float32
NO_NETWORK = re.compile("Operation not permitted|Network is unreachable|name resolution|Name or service not known")
_SENTENCE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}")  # a word, which mathematical expressions do not contain
_SEVERAL = re.compile(r"\b(?:or|not|between\s+[^\s\d]*\d\S*\s+and)\s+[^\s\d]*\d\S*(?:\s+[^\s\d]+){0,2}\W*$")
"""A last number that is one of several, or negated: `6 or 7`, `8, not 7`, `between 6 and 7 apples`."""
_OWN = {"prompt", "response", "answer"}
COMPLETION_IDS = "completion_ids"  # TRL's name of the response's tokens
_MARKS = {"completions", COMPLETION_IDS, "solution_str", "solution_strs", "queries"}
"""The parameters by which TRL's, verl's and OpenRLHF's rewards are recognised."""
_REGISTERED: dict[str, _Registered] = {}


@dataclass(frozen=True)
class _Registered:
    function: RewardFunction
    parameters: type[Options]
    reads: Callable[[str, str], str]  # (response, prompt) -> the part of the response that the function sees


def _whole(response: str, _: str) -> str:
    return response


def register_reward(
    name: str, parameters: type[Options] = Options, reads: Callable[[str, str], str] = final_part
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that registers a reward under `name` for `data.reward`.

    Args:
        parameters: The model of its parameters, which are passed as the last argument, if it has any.
        reads: Selects the part of a response that it sees, unless `data.answer_from` asks for the whole.
    """

    def decorate(function: RewardFunction) -> RewardFunction:
        if name == "task" or name in _REGISTERED:
            raise ValueError(f"data.reward: another reward is already registered as {name!r}")
        _REGISTERED[name] = _Registered(function, parameters, reads)
        return function

    return decorate


def make_rewards(config: DataConfig) -> list[Reward]:
    """Make the parts of `data.reward`, each of which may raise, return anything, hang or end its process.

    Raises:
        ConfigError: There is no such reward, or it does not accept these parameters.
    """
    refuse_network(config)
    return [_make_reward(config, part) for part in config.reward]


def weighted(weights: Sequence[float], parts: Sequence[float]) -> float:
    """The reward of a response, given the values of its parts; one with weight 0 may be NaN."""
    return math.fsum(weight * part for weight, part in zip(weights, parts, strict=True) if weight)


def _make_reward(config: DataConfig, part: RewardPart) -> Reward:
    found = _REGISTERED.get(part.name)
    if found is not None:
        return _registered(config, part, found)
    if part.parameters:
        raise ConfigError(f'data.reward = "{part.name}" takes no parameters: leave {", ".join(part.parameters)} out')
    if part.name != "task":
        return _imported(config, part.name)
    if config.source != "generators":
        raise ConfigError(
            'data.reward = "task" is a generator\'s own scorer; with data.source = "file" use one of '
            f"{', '.join(_REGISTERED)}, or an import path package.module:function"
        )
    return _task_reward(config)


def _registered(config: DataConfig, part: RewardPart, found: _Registered) -> Reward:
    try:
        parameters = found.parameters.model_validate(part.parameters, context=config)
    except ValidationError as error:
        raise ConfigError(explain(error, found.parameters, ("data", "reward", part.name))) from None
    more = () if found.parameters is Options else (parameters,)
    reads = found.reads if config.answer_from == "final_part" else _whole
    return lambda prompt, response: found.function(prompt.text, reads(response, prompt.text), prompt.answer, *more)


def warm_up(config: DataConfig, part: RewardPart, reward: Reward) -> None:
    """Score a right answer, so that a built-in reward imports and caches what it needs before the process is forked.

    Rewards with parameters are skipped: they run a model's code or ask a server, and import nothing.
    """
    if part.name == "task":
        for index, generator in enumerate(config.generators):
            problem = next(iter(make_generator(generator).problems(0)))
            metadata = {"generator": index, "entry": problem.entry}
            judge(reward, Prompt(0, problem.question, [], problem.answer, metadata), problem.demonstration)
    elif part.name in _REGISTERED and _REGISTERED[part.name].parameters is Options:
        judge(reward, Prompt(0, "", [], "$\\frac{1}{2} + x^2$"), "Answer: $x^2 + 1/2$")


def _task_reward(config: DataConfig) -> Reward:
    generators = [make_generator(generator) for generator in config.generators]
    part = after_thoughts if config.answer_from == "final_part" else _whole

    def reward(prompt: Prompt, response: str) -> float:
        index: int = prompt.metadata["generator"]
        return generators[index].score(part(response, prompt.text), prompt.answer, prompt.metadata["entry"])

    return reward


def is_built_in(config: DataConfig, environment: str | None = None) -> bool:
    """Whether all parts of `data.reward`, or the environment in its place, are specrl's own."""
    return ":" not in environment if environment is not None else not any(":" in part.name for part in config.reward)


def starts_processes(config: DataConfig, environment: str | None = None) -> bool:
    """Whether a part of `data.reward`, or the environment in its place, may start processes."""
    return not is_built_in(config, environment) or bool(runs_code(config, environment))


def runs_code(config: DataConfig, environment: str | None = None) -> str:
    """The setting, if any, that runs a model's code: a part of `data.reward`, or the environment in its place."""
    if environment is not None:
        return 'environment.name = "python"' if environment == "python" else ""
    return 'data.reward = "code"' if any(part.name == "code" for part in config.reward) else ""


def refuse_network(config: DataConfig, environment: str | None = None) -> None:
    """Raise ConfigError if a model's code would run with network access."""
    if config.reward_network and (named := runs_code(config, environment)):
        raise ConfigError(f"data.reward_network = true: what {named} runs may not use the network; set it to false")


def judge(reward: Reward, prompt: Prompt, response: str) -> float | str | None:
    """The reward of a response, None if the reward leaves it out, or one line that says why the reward failed.

    It fails if it raises, or returns neither a finite number nor a table with one as `score`.
    """
    try:
        value = _only(_resolved(reward(prompt, response)))
        if isinstance(value, dict) and "score" in value:
            value = _only(value["score"])
    except (Exception, SystemExit) as error:  # foreign code: it may fail on one response and not on the next
        return raised(error)
    if value is None:
        return None
    try:
        number = float("nan") if isinstance(value, str | bytes) else float(value)
    except Exception:  # of whatever was returned
        number = float("nan")
    return number if abs(number) <= LARGEST else f"returned {_text(value)}, which is not a finite number"


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def raised(error: BaseException) -> str:
    """One line about an error raised by the user's code."""
    return f"raised {shortened(type(error).__name__)}: {_text(error)}{_of_sandbox(error)}"


def _of_sandbox(error: BaseException) -> str:
    """Which of a reward's limits caused an error, if recognisable."""
    words = f"{_text(error)} {_text(error.__cause__ or error.__context__)}"
    frames = [*traceback.walk_tb(error.__traceback__)]
    if isinstance(error, FileNotFoundError) and not str(error.filename).startswith("/"):
        return " (it runs in an empty folder: name files beside its module by Path(__file__))"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return " (it may write in the folder that it runs in alone)"
    if isinstance(error, KeyError) and frames and frames[-1][0].f_code is type(os.environ).__getitem__.__code__:
        return " (it sees the variables that data.reward_environment names)"
    return " (it has no network without data.reward_network = true)" if NO_NETWORK.search(words) else ""


def _text(thing: object) -> str:
    try:
        return shortened(str(thing) if isinstance(thing, BaseException) else reprlib.repr(thing))
    except Exception:
        return "something that has no text"


def shortened(text: str, limit: int = 120) -> str:
    """Shorten text to one line of at most `limit` characters without its middle; control characters are escaped."""
    ends = text if len(text) <= 20 * limit else f"{text[: 10 * limit]} {text[-10 * limit :]}"
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(ends.split()))
    return line if len(line) <= limit else f"{line[: limit // 2]} ... {line[-limit // 2 :]}"


@register_reward("math_verify")
def math_verify(_: str, response: str, answer: str) -> float:
    """1 if the stated answer equals the reference as text or as a mathematical expression, else 0.

    Only the stated answer is judged, so intermediate numbers do not count. Both are read as boxed LaTeX; a sentence
    without LaTeX is also searched for its last number. A reference in words is compared only as text.
    """
    from math_verify import parse, verify
    from sympy import FiniteSet

    # math-verify limits its time by SIGALRM, which only the main thread may set; elsewhere it has no limit.
    seconds = MATH_VERIFY_SECONDS if threading.current_thread() is threading.main_thread() else None
    stated, (wanted, *others) = references(extract_answer(response), named=False)[0], references(answer)[:2]
    if stated and any(same(stated, reference) for reference in (wanted, *others)):
        return 1.0
    if not stated or is_text(wanted) or contradicts(stated, wanted):
        return 0.0
    true = as_latex(formula(wanted))
    try:
        latex = keep_variable(bounded_latex(as_latex(formula(stated))), true)
    except NotAnAnswerError:
        return 0.0
    gold, found = (_read(text, other, seconds) for text, other in ((keep_variable(true, latex), latex), (latex, true)))
    readings = [found]
    if _SENTENCE.search(latex) and not re.search(r"\\(?![$%])|[\^!]", latex) and not _SEVERAL.search(latex):
        readings.append(parse(latex.replace("\\$", ""), parsing_timeout=seconds))
    check = partial(
        verify,
        gold,
        numeric_precision=DIGITS if any(map(_is_inexact, (gold, *readings))) else EXACT_DIGITS,
        timeout_seconds=seconds,
        allow_set_relation_comp=not any(isinstance(one, FiniteSet) for one in gold),
    )
    return float(any(check(one) and not _is_other_size(_number(gold), _number(one)) for one in readings))


def _read(latex: str, other: str, seconds: int | None) -> Any:
    """An answer as one expression: of what is none, such as `3 + \\tg 2`, math-verify would take the last number."""
    from math_verify import LatexExtractionConfig, parse

    read = partial(parse, extraction_config=[LatexExtractionConfig()], parsing_timeout=seconds)
    first, second = in_order(latex, other), without_lead(latex, other)
    found = read(f"\\boxed{{{first}}}")
    return found if len(found) > 1 or first == second else read(f"\\boxed{{{second}}}")


def _is_inexact(parsed: Sequence[Any]) -> bool:
    """Whether an answer contains what is computed to few digits; otherwise no power may be rounded away."""
    from sympy import Float, Integral, Limit, Product, Sum

    return any(not isinstance(one, str) and one.has(Float, Integral, Limit, Product, Sum) for one in parsed)


def _number(parsed: Sequence[Any]) -> Any:
    """The values of an answer, or of what it is said to equal, if quickly evaluated; a percentage has two readings."""
    from sympy import Eq, Expr, Integral, Limit, Product, Sum, UnevaluatedExpr

    value = next(iter(parsed), None)
    value = value.rhs if isinstance(value, Eq) else value
    if not isinstance(value, Expr) or value.free_symbols or value.has(Integral, Limit, Product, Sum, UnevaluatedExpr):
        return None
    return value


def _is_other_size(gold: Any, found: Any) -> bool:
    """Whether two small numbers, as in physics, differ: math-verify takes `3e-9` for `2e-9`."""
    from sympy import Float

    if gold is None or found is None or gold == found:
        return False
    tolerance = ROUNDING if gold.has(Float) or found.has(Float) else 1e-9
    try:
        size, apart = abs(gold.evalf()), abs(gold.evalf() - found.evalf())
        return bool(0 < size < 1e-3 and apart > tolerance * size)
    except (ArithmeticError, TypeError, ValueError):  # sympy cannot tell
        return False


@register_reward("exact_match")
def exact_match(_: str, response: str, answer: str) -> float:
    """1 if the stated answer is the reference, or one of a JSON list of texts, by `answers.same`, else 0.

    An empty response never counts: with an empty reference, silence would earn 1.
    """
    stated = references(extract_answer(response), named=False)[0]
    return float(bool(stated) and any(same(stated, reference) for reference in references(answer)))


class LengthParameters(Options):
    """The parameters of `length`, in characters, because rewards see text; `train.overlong_window` counts tokens."""

    target: NonNegativeInt
    """The longest response that earns 1."""
    limit: NonNegativeInt | None = None
    """The length from which a response earns 0; the reward falls linearly from `target`. By default it is a step."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.limit is not None and self.limit <= self.target:
            raise ValueError(f"limit = {self.limit}: it must be above target = {self.target}")
        return self


@register_reward("length", LengthParameters, _whole)
def length(_: str, response: str, __: str, parameters: LengthParameters) -> float:
    """1 for a response of at most `target` characters, including thoughts, and less for longer ones.

    Since advantages are relative to a group, this acts as a penalty of up to the part's weight; without `limit` it is
    GDPO's length reward (arXiv 2601.05242).
    """
    limit = parameters.limit or parameters.target + 1
    return min(1.0, max(0.0, (limit - len(response)) / (limit - parameters.target)))


register_reward("code", CodeParameters, after_thoughts)(run_tests)
register_reward("judge", JudgeParameters, after_thoughts)(ask_judge)


def _imported(config: DataConfig, path: str) -> Reward:
    """Adapt an imported function, whose parameters show its convention: specrl's, TRL's, verl's or OpenRLHF's."""
    if ":" not in path:
        known = ", ".join(["task", *_REGISTERED])
        raise ConfigError(f'data.reward = "{path}": it must be {known} or package.module:function')
    function = import_function("data.reward", path)
    try:
        signature = inspect.signature(function)
        parameters = signature.parameters
        by_name = _takes_names(parameters)
        if not by_name and not parameters.keys() & _MARKS:
            signature.bind_partial("prompt", "response", "answer")
    except (TypeError, ValueError) as error:
        raise ConfigError(f'data.reward = "{path}" does not take (prompt, response, answer): {error}') from error
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def taken(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if takes_all or name in parameters}

    def as_trl(prompt: Prompt, response: str) -> Any:
        asked: Any = prompt.text
        said: Any = response
        if config.template == "chat":  # TRL's form of conversations
            before = [one for one in prompt.metadata.get("context", ()) if one["role"] != "tools"]
            asked = [*before, {"role": "user", "content": prompt.metadata.get("question", prompt.text)}]
            said = [{"role": "assistant", "content": response}]
        columns = {name: [value] for name, value in _columns(config, prompt).items()}
        tokens = prompt.metadata.get(COMPLETION_IDS, [*response.encode()])  # in a trial there is no tokenizer
        return function(**taken({**columns, "prompts": [asked], "completions": [said], COMPLETION_IDS: [tokens]}))

    def as_verl(prompt: Prompt, response: str) -> Any:
        columns = _columns(config, prompt)
        values = {
            "solution_str": response,
            "ground_truth": prompt.answer,
            "extra_info": columns.get("extra_info", columns),
        }
        values["data_source"] = columns.get("data_source", str(config.path))
        if "solution_strs" in parameters:  # a batch of one
            values = {f"{name}s": [value] for name, value in values.items()}
        return function(**taken(values))

    def as_own(prompt: Prompt, response: str) -> Any:
        if by_name:
            own = {"prompt": prompt.text, "response": response, "answer": prompt.answer}
            return function(**taken({**_columns(config, prompt), **own}))
        # A decorator's (*args, **kwargs) forwards to parameters of these names.
        hands_on = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
        positional = {*list(parameters)[:3], *(_OWN if hands_on else ())}
        others = {name: value for name, value in _columns(config, prompt).items() if name not in positional}
        return function(prompt.text, response, prompt.answer, **taken(others))

    def as_openrlhf(prompt: Prompt, response: str) -> Any:
        texts = {"queries": [prompt.text + response], "prompts": [prompt.text], "labels": [prompt.answer]}
        found = _resolved(function(**taken(texts)))
        return found["rewards"] if isinstance(found, dict) and "rewards" in found else found

    forms = {"completions": as_trl, COMPLETION_IDS: as_trl, "queries": as_openrlhf}
    forms |= dict.fromkeys(("solution_str", "solution_strs"), as_verl)
    return next((form for name, form in forms.items() if name in parameters), as_own)


def _takes_names(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a user's function takes prompt, response and answer by these names, in any order.

    After (prompt, response), the third is the answer whatever its name; (query, output, gold) works likewise.
    """
    kinds = {one.kind for one in parameters.values()}
    if kinds & {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL}:
        return False
    ordered = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    if "response" not in parameters:
        return not ordered and inspect.Parameter.VAR_KEYWORD in kinds
    return _OWN.issuperset(ordered[:2]) and (len(ordered) < 3 or ordered[:2] != ["prompt", "response"])


def _columns(config: DataConfig, prompt: Prompt) -> dict[str, Any]:
    return {**(prompt.metadata.get("entry") or {}), config.answer_column: prompt.answer}


def _resolved(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited())
