"""A review of reasoning-gym's scorers: what each does with an answer, and how answers are made safe for it.

Generators missing from this table, and other versions of the library, are refused, so that no upgrade brings in
unreviewed code. `tests/security/scorer_calls.py` lists what the scorers of a version call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

from specrl.config import ConfigError
from specrl.data.scorers.expressions import (
    LONGEST,
    LONGEST_LISTING,
    NotAnAnswerError,
    bounded_expression,
    bounded_listing,
)

VERSION = "0.1.25"
"""The reviewed version of reasoning-gym."""
LONGEST_CUBE = 1_000  # cube turns in one answer
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
    """Allow only numbers: the scorer would accept NaN, which has no distance from any number."""
    if re.search("nan|inf", answer, re.IGNORECASE):
        raise NotAnAnswerError("the answer is no finite number")
    return plain(answer, entry)


def same(answer: str, entry: Entry) -> str:
    """Allow only the right answer: the scorer accepts any text."""
    if answer.casefold() != str(entry["answer"]).casefold():
        raise NotAnAnswerError("the answer is another one")
    return answer


def short_number(answer: str, _: Entry) -> str:
    """Allow a decimal number or a fraction with an exponent of two digits: `Fraction` computes that power of 10."""
    number = r"[+-]?(?:\d[\d_]{0,99}(?:\s*/\s*\d{1,99}|\.?\d{0,99})|\.\d{1,99})(?:[eE][+-]?\d{1,2})?"
    if not re.fullmatch(number, answer.replace(",", "").strip()):
        raise NotAnAnswerError("the answer is no number")
    return answer


def cube_turns(answer: str, entry: Entry) -> str:
    """Allow few turns: the scorer repeats a turn by the number after it."""
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


class Review(NamedTuple):
    """How answers to one generator are made safe."""

    guard: Guard = plain
    refusals: tuple[type[Exception], ...] = ()  # raised by the scorer for text that is no answer


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
)  # scorers that compare the answer with the right one, split it, or read numbers or JSON
REVIEWED: dict[str, Review] = {
    "binary_matrix": Review(listing),
    "bitwise_arithmetic": Review(),  # evaluates the problem's own text
    "boxnet": Review(refusals=(AttributeError, IndexError, KeyError, TypeError)),
    "calendar_arithmetic": Review(refusals=(OverflowError,)),
    "complex_arithmetic": Review(finite),
    "codeio": Review(refusals=(RecursionError,)),
    "coin_flip": Review(short_number),
    "countdown": Review(numbers_only),
    "game_of_life": Review(refusals=(KeyError,)),
    "game_of_life_halting": Review(same),
    "intermediate_integration": Review(antiderivative),
    "n_queens": Review(listing),
    "number_sorting": Review(finite),  # evaluates the problem's own text
    "polynomial_multiplication": Review(polynomial),
    "prime_factorization": Review(refusals=(ValueError,)),
    "propositional_logic": Review(formula),
    "puzzle24": Review(numbers_only),
    "rubiks_cube": Review(cube_turns),
    "rush_hour": Review(short_moves),
    "simple_integration": Review(antiderivative),
    "spiral_matrix": Review(listing),
    "string_insertion": Review(listing),
    "time_intervals": Review(refusals=(OverflowError,)),
    **dict.fromkeys(_COMPARING.split(), Review()),
}


def refuse_unreviewed(name: str) -> None:
    """Raise ConfigError for a generator whose scorer was not reviewed in the installed version."""
    refused = f"data.generators: {name} cannot be used"
    if name not in REVIEWED:
        raise ConfigError(f"{refused}: its scorer has not been reviewed for what it does with a model's text")
    if (installed := version("reasoning-gym")) != VERSION:
        raise ConfigError(
            f"{refused}: what scorers do with a model's text has been reviewed for reasoning-gym {VERSION}, and "
            f"{installed} is installed; install the locked requirements"
        )
