"""The review of reasoning-gym's scorers: what each does with an answer, and how the answer is made safe for it.

A generator that is not in this table, or whose scorer calls what was not reviewed, is refused: an upgrade of
reasoning-gym brings nothing that nobody has looked at.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from specrl.data.scorers.expressions import (
    LONGEST,
    LONGEST_LISTING,
    NotAnAnswerError,
    bounded_expression,
    bounded_listing,
)

PACKAGE = "reasoning_gym"
_DANGEROUS = (
    "eval exec compile parse_expr sympify S parse_latex lambdify literal_eval __import__ import_module run_path "
    "run_module system popen Popen check_output check_call run call spawn safe_load unsafe_load full_load "
    "safe_load_all load loads load_module getattr setattr globals locals vars open fork simplify"
)
DANGEROUS = frozenset(_DANGEROUS.split())  # they evaluate text, import, start programs, or reach by name
HARMLESS = frozenset(("re.compile", "json.loads", "json.load"))  # calls that only look dangerous
LONGEST_CUBE = 1_000  # turns of a cube in one answer
CONSTANT_OF_INTEGRATION = re.compile(r"[A-DF-HJ-MPRT-Za-z](?:_?\d)?|[Cc]onst(?:ant)?")  # E, I, N, O, Q, S: SymPy's

Entry = Mapping[str, Any]
Guard = Callable[[str, Entry], str]  # (answer, entry) -> the answer as the scorer gets it, or NotAnAnswerError


def plain(answer: str, _: Entry) -> str:
    """Bound the length of an answer that the scorer compares, splits, or reads as numbers or JSON."""
    if len(answer) > LONGEST_LISTING:
        raise NotAnAnswerError("the answer is too long")
    return answer


def numbers_only(answer: str, _: Entry) -> str:
    """Allow arithmetic on numbers."""
    return bounded_expression(answer)


def polynomial(answer: str, entry: Entry) -> str:
    """Allow arithmetic on numbers and the problem's variables."""
    return bounded_expression(answer, [str(variable) for variable in entry["metadata"]["variables"]])


def antiderivative(answer: str, entry: Entry) -> str:
    """Allow arithmetic on numbers, functions, the problem's variable and a constant of integration."""
    constants = filter(CONSTANT_OF_INTEGRATION.fullmatch, re.findall(r"[A-Za-z]\w*", answer[:LONGEST]))
    return bounded_expression(answer, {str(entry["metadata"]["variable"]), *constants})


def listing(answer: str, entry: Entry) -> str:
    """Allow a right answer, and any list."""
    right = (entry["answer"], *entry["metadata"].get("valid_answers", ()))
    return answer if answer in [text.strip() for text in right] else bounded_listing(answer)


def finite(answer: str, entry: Entry) -> str:
    """Allow numbers alone: NaN is at no distance from any number, and the scorer takes it for the right one."""
    if re.search("nan|inf", answer, re.IGNORECASE):
        raise NotAnAnswerError("the answer is no finite number")
    return plain(answer, entry)


def same(answer: str, entry: Entry) -> str:
    """Allow the right answer alone: the scorer takes any text for it."""
    if answer.casefold() != str(entry["answer"]).casefold():
        raise NotAnAnswerError("the answer is another one")
    return answer


def short_number(answer: str, _: Entry) -> str:
    """Allow a decimal number or a fraction whose exponent has two digits: `Fraction` computes 10 to its power."""
    number = r"[+-]?(?:\d[\d_]{0,99}(?:\s*/\s*\d{1,99}|\.?\d{0,99})|\.\d{1,99})(?:[eE][+-]?\d{1,2})?"
    if not re.fullmatch(number, answer.replace(",", "").strip()):
        raise NotAnAnswerError("the answer is no number")
    return answer


def cube_turns(answer: str, entry: Entry) -> str:
    """Allow few turns: the scorer repeats a turn as often as the number after it says."""
    counts = [int(digits[:6]) for digits in re.findall(r"\d+", plain(answer, entry))]
    if sum(counts) + len(answer.split()) > LONGEST_CUBE:
        raise NotAnAnswerError("the answer has too many turns")
    return answer


def short_moves(answer: str, entry: Entry) -> str:
    """Allow moves of a few steps: the scorer tries each step of a move."""
    if re.search(r"[+-]\d{3}", answer) or len(answer) > 10_000:
        raise NotAnAnswerError("a move of the answer is too long")
    return answer


def formula(answer: str, _: Entry) -> str:
    """Allow variables of one letter: the scorer tries all values of all of them."""
    if len(answer) > 500 or re.search(r"[^A-Z∧∨¬→↔()\s]|[A-Z]\s*[A-Z]", answer):
        raise NotAnAnswerError("the answer is no formula")
    return answer


@dataclass(frozen=True)
class Review:
    """How answers to one generator are made safe."""

    guard: Guard = plain
    calls: frozenset[str] = frozenset()
    """Functions of `DANGEROUS` that only read what `guard` returns, or the problem's own data."""
    refusals: tuple[type[Exception], ...] = field(default=())  # what the scorer raises on a text that is no answer


def _on(guard: Guard, *calls: str) -> Review:
    return Review(guard, frozenset(calls))


_COMPARING = (
    "ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation "
    "caesar_cipher chain_sum circuit_logic color_cube_rotation count_bits count_primes "
    "course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships "
    "figlet_font fraction_simplification futoshiki gcd graph_color group_anagrams gsm_symbolic "
    "isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm leg_counting letter_counting "
    "letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid needle_haystack "
    "number_filtering number_format number_sequence palindrome_generation palindrome_partitioning path_star "
    "polynomial_equations pool_matrix power_function products quantum_lock ransom_note rearc rectangle_count "
    "rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path simple_equations simple_geometry "
    "sokoban spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism "
    "tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles"
)  # their scorers compare the answer with the right one, split it, or read numbers or JSON
REVIEWED: dict[str, Review] = {
    "binary_matrix": _on(listing, "eval"),
    "bitwise_arithmetic": _on(plain, "eval"),  # of the problem's own text
    "boxnet": Review(refusals=(AttributeError, IndexError, KeyError, TypeError)),
    "calendar_arithmetic": Review(refusals=(OverflowError,)),
    "complex_arithmetic": _on(finite),
    "codeio": Review(refusals=(RecursionError,)),
    "coin_flip": _on(short_number),
    "countdown": _on(numbers_only, "parse_expr"),
    "game_of_life": Review(refusals=(KeyError,)),
    "game_of_life_halting": _on(same),
    "intermediate_integration": _on(antiderivative, "parse_expr", "simplify"),
    "n_queens": _on(listing, "eval"),
    "number_sorting": _on(finite, "eval"),  # of the problem's own text
    "polynomial_multiplication": _on(polynomial, "parse_expr"),
    "prime_factorization": Review(refusals=(ValueError,)),
    "propositional_logic": _on(formula, "simplify"),  # a method of its own
    "puzzle24": _on(numbers_only, "parse_expr"),
    "rubiks_cube": _on(cube_turns),
    "rush_hour": _on(short_moves),
    "simple_integration": _on(antiderivative, "parse_expr", "simplify"),
    "spiral_matrix": _on(listing, "eval"),
    "string_insertion": _on(listing, "eval"),
    "time_intervals": Review(refusals=(OverflowError,)),
    **dict.fromkeys(_COMPARING.split(), Review()),
}


def refuse_unreviewed(name: str, dataset: type) -> None:
    """Raise ValueError for a generator whose scorer was not reviewed, or has changed since it was."""
    review = REVIEWED.get(name)
    if review is None:
        raise ValueError("its scorer has not been reviewed for what it does with a model's text")
    unknown = sorted(dangerous_calls(dataset) - review.calls)
    if unknown:
        raise ValueError(
            f"its scorer calls {', '.join(unknown)}, which has not been reviewed: a model's text may reach it"
        )


def dangerous_calls(dataset: type) -> frozenset[str]:
    """The functions of `DANGEROUS` that a data set's `score_answer`, or what it uses of the package, calls."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting: list[tuple[Any, type]] = [(inspect.getattr_static(dataset, "score_answer"), dataset)]
    while waiting:
        function, owner = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        names = {**inspect.unwrap(function).__globals__, "self": owner, "cls": owner}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                target = _resolved(node, names)
                own = list(_functions(target, owner))
                waiting += own
                if not own and _last(node) in DANGEROUS and ast.unparse(node) not in HARMLESS:
                    found.add(_last(node))
    return frozenset(found)


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _resolved(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolved(node.value, names)
        if isinstance(owner, ModuleType | type):
            return inspect.getattr_static(owner, node.attr, None)
    return None


def _functions(target: Any, owner: type) -> Iterator[tuple[Any, type]]:
    if isinstance(target, staticmethod | classmethod):
        target = target.__func__
    if isinstance(target, property):
        target = target.fget
    if not str(getattr(target, "__module__", "")).startswith(PACKAGE):
        return
    if inspect.isfunction(target):
        if PACKAGE in inspect.unwrap(target).__code__.co_filename:  # what `dataclass` makes has no source
            yield target, owner
    elif inspect.isclass(target) and target is not owner:
        for value in vars(target).values():
            for function, _ in _functions(value, target):
                yield function, target
