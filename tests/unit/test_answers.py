"""Which answer of a response counts, and when it is the reference, as common data sets and models write both."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from math_verify import parse as parse_latex

from specrl.config import DataConfig
from specrl.data.answers import close_thoughts, contradicts, format_answer
from specrl.data.problems import Prompt
from specrl.data.rewards.functions import _number, make_rewards

GSM8K = "She packs 4*6=<<4*6=24>>24 jars.\nThen 24-5=<<24-5=19>>19 are left.\n#### {}"
RUN_ON = "Answer: 73\n\nQuestion: What is 2+2?\nAnswer: 4"
INSIDE = "<think>\nAnswer: 73\n</think>\nI give up."


def earned(reward: str, reference: str, response: str, **settings: str) -> float:
    config = DataConfig.model_validate({"source": "file", "path": Path("x.jsonl"), "reward": reward} | settings)
    return float(make_rewards(config)[0](Prompt(1, "", [], reference), response))


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>maybe Answer: 5, no</think>\nSo the result is \\boxed{73}.", True),
        (INSIDE, False),
        ("<think>Answer: 73", False),
        ("so 70 + 3</think>\nAnswer: 73", True),
        ("<thought>\\boxed{5}</thought>73", True),
        ("<reasoning>Answer: 73</reasoning>\nI cannot tell.", False),
        ("<|begin_of_thought|>\\boxed{73}", False),
        (RUN_ON, True),
        ("Answer: 4\n\nQ: 70+3?\nA: 73\nAnswer: 73", False),
        ("Answer: 73<|im_end|>\n<|im_start|>user\nAnswer: 4", True),
        ("<answer>73</answer>\nHuman: next one\n<answer>4</answer>", True),
        ("Question: how many?\nAnswer: 73", True),
        ("Answer: 4. Wait.\nAnswer: 73", True),
        ("Answer: 4, or rather \\boxed{73}", True),
        ("\\boxed{4}, no: \\boxed{73}", True),
        ("\\boxed{73} and \\boxed{4", True),
        ("$\\boxed{ 73 }$", True),
        ("\\fbox{73}", True),
        ("**Answer:** 73", True),
        ("**Answer**: 73", True),
        ("**Final Answer: 73**", True),
        ("**Final Answer**\n\nThe final answer is $\\boxed{73}$. I hope it is correct.", True),
        ("### Answer\n73", True),
        ("Answer:\n\n$$73$$", True),
        ("<Answer>73</Answer>", True),
        ("<ANSWER>73</answer> and <answer>4", True),
        ("The answer is 73.", True),
        ("The answer is 73. Is the answer right?", True),
        ("The final answer is \\(73\\)", True),
        ("Answer：73", True),
        ("答案：73", True),
        ("Antwort: 73", True),
        ("Answer (in apples): 73", True),
        ("Answer: 73 apples", True),
        ("Answer: $73", True),
        ("Answer: $73.00", True),
        ("Answer: 73%", True),
        ("<<70+3=73>>\n#### 73", True),
        ("Answer: 73 million", False),
        ("Answer: 73 or 74", False),
        ("Answer: 7", False),
        ("Answer: 730", False),
        ("Answer: -73", False),
        ("", False),
    ],
)
def test_the_answer_that_counts_is_the_last_one_after_the_thoughts_and_before_a_run_on(
    reward: str, response: str, right: bool
) -> None:
    assert earned(reward, "73", response) == right


@pytest.mark.parametrize("reward", ["exact_match", "math_verify", "task"])
@pytest.mark.parametrize("begun", ["<think>\n", "<reasoning>", "<|begin_of_thought|>\n\n"])
def test_thoughts_that_the_prompt_has_begun_must_end_too(reward: str, begun: str) -> None:
    data: dict[str, object] = {"source": "file", "path": Path("x.jsonl")} if reward != "task" else {}
    (score,) = make_rewards(DataConfig.model_validate({**data, "reward": reward}))
    prompt = Prompt(1, f"70+3?{begun}", [], "73", {"generator": 0, "entry": {"terms": [70, 3]}})
    assert score(prompt, "maybe Answer: 73") == 0
    assert score(prompt, close_thoughts(prompt.text, " Answer: 73")) == 1
    assert score(replace(prompt, text="<think>\n\n</think>\n\n"), "maybe Answer: 73") == 1
    assert close_thoughts("<think> what?", " Answer: 73") == " Answer: 73"


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("B", "Answer: (B) or (C)"),
        ("B", "Answer: B. or C."),
        ("B", "Answer: (B)(C)"),
        ("7", "Answer: either 6 or 7"),
        ("7", "Answer: between 6 and 7"),
        ("7", "Answer: I think it is 8, not 7"),
        ("7", "Answer: She needs 6 or 7 more apples."),
        ("B", "Answer: (B) and c) Paris"),
        ("B", "Answer: B) c) Paris"),
    ],
)
def test_a_response_that_names_several_answers_has_none(reward: str, reference: str, response: str) -> None:
    assert earned(reward, reference, response) == 0


@pytest.mark.parametrize(
    "stated",
    [
        "The distance between A and B is 42",
        "The distance between the towns is 42 km.",
        "She does not have enough; she needs 42 more",
        "Whether you go left or right it is 42",
        "The number of primes between 1 and 181 is 42.",
    ],
)
def test_a_sentence_may_say_or_and_not_before_its_number(stated: str) -> None:
    assert earned("math_verify", "42", f"Answer: {stated}") == 1


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
@pytest.mark.parametrize(
    "stated",
    ["(B), i.e. Paris", "(B) E. coli", "B. A. Lincoln", "(B) I. only", "(B) (x)", "(B) or b", "(B) and (B)", "B)"],
)
def test_what_follows_the_letter_of_a_choice_is_no_second_choice(reward: str, stated: str) -> None:
    assert earned(reward, "B", f"Answer: {stated}") == 1


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
@pytest.mark.parametrize(
    ("reference", "stated", "right"),
    [
        ("J. K. Rowling", "J", False),
        ("E. coli", "E", False),
        ("(a)b", "a", False),
        ("(b) + c", "b", False),
        ("(B) Paris", "B", True),
        ("b) paris", "B", True),
        ("B: the town", "B", True),
        ("B. 42", "B", True),
        ("B) Paris", "(b) Paris", True),
        (r"\textbf{(B)}\ 5", "B", True),
        (r"\textbf{(B)}\ -5", r"\boxed{\text{(B)}}", True),
        (r"\text{(B) } 12", "(B) 12", True),
        (r"\mathrm{(B)}\ \text{none}", "C", False),
        (r"\textbf{(B)}\ 5", r"\textbf{(C)}\ 5", False),
        (r"\mathbf{A}\times\mathbf{B}", "A", False),
        (r"\text{(A)}\cup B", "A", False),
        (r"\text{(A)} \cup B", "A", False),
        (r"\text{(a)}^2", "a", False),
        (r"\text{(A)}x", "A", False),
        (r"\mathrm{(A)} + \mathrm{(B)}", "A", False),
        (r"\mathrm{(A)} - \mathrm{(B)}", "A", False),
        (r"\text{(A)} \text{ or } \text{(B)}", "A", False),
        (r"\text{(A)} or (B)", "A", False),
        (r"\text{(A)}, 5", "A", False),
        (r"\textbf{(D)}\ e", "E", False),
        (r"\textbf{(D)}\ e", "(E)", False),
        (r"\textbf{(D)}\ e", r"\textbf{E}", False),
        (r"\textbf{(D)}\ 5", "E. 5", False),
        (r"\textbf{(D)}\ e", "D", True),
        (r"\textbf{(D)}\qquad\log 2", "D", True),
        (r"\textbf{(D) }\left(1, 2\right)", "D", True),
        (r"\textbf{(D)}~\{1, 2\}", "D", True),
    ],
)
def test_a_letter_is_the_choice_whose_text_the_reference_has_and_no_initial(
    reward: str, reference: str, stated: str, right: bool
) -> None:
    assert earned(reward, reference, f"Answer: {stated}") == right


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
@pytest.mark.parametrize(
    ("reference", "response", "right"),
    [
        ("Option D", "D", True),
        ("option (D)", r"\boxed{D}", True),
        ("Option D: Paris", "Answer: D", True),
        ("D", "Answer: Option D: Paris", True),
        ("Option D", "Answer: C", False),
        ("C", "Answer: [C]", True),
        ("C", "Answer: C, because it is so", True),
        ("C", "Answer: C, D", False),
        ("AC", "Answer: A, C", True),
        ("A and C", r"\boxed{A, C}", True),
        ("A, C", "Answer: AC", True),
        ("A,C", "Answer: A", False),
        ("AC", "Answer: A, D", False),
        ("yes", "The answer is yes, because it is so.", True),
        ("no", "Answer: No. It does not.", True),
        ("no", "Answer: no solution", False),
        ("(100,200)", r"\boxed{(100200)}", False),
        ("(100200)", r"\boxed{(100,200)}", False),
        ("(100, 200)", r"\boxed{(100,200)}", True),
        ("100,200", r"\boxed{100200}", True),
        ("5", "Answer: five", True),
        ("Twelve", "Answer: 12", True),
        ("5", "Answer: six", False),
        (r"k\pi, k \in \mathbb{Z}", r"\boxed{k\pi, k\in\mathbb{Z}}", True),
    ],
)
def test_choices_points_and_numbers_in_words_are_compared_as_what_they_are(
    reward: str, reference: str, response: str, right: bool
) -> None:
    assert earned(reward, reference, response) == right


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
@pytest.mark.parametrize(
    "response",
    [
        r"It is \boxed{73}. I have put it into \boxed{}.",
        r"Hence $\boxed 73$.",
        "#### Final Answer\n73",
        "The answer is:\n\\[\n73\n\\]",
        "**Answer:**\n$$\n73\n$$",
        "73</s>",
        "73<|im_end|>\n<|im_start|>user\nAnswer: 4",
        r"\boxed{73}, as you wanted it in \boxed notation.",
        "73\n\nQuestion: What is 2+2?\n4",
        "答案是73。",
        "73。",
        "La respuesta es 73.",
        "The answer is therefore 73.",
        "The answer should be 73.",
    ],
)
def test_an_answer_is_found_in_the_forms_that_models_state_it_in(reward: str, response: str) -> None:
    assert earned(reward, "73", response) == 1
    assert earned(reward, "4", response) == 0


def test_a_preamble_before_the_question_is_no_answer() -> None:
    assert earned("math_verify", "73", "Let me see.\nProblem: What is 70+3?\nThat makes 73") == 1
    assert earned("math_verify", "16", "To find what the result is:\n1. 5+3 is 8.\n2. Twice that makes 16") == 1


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (r"\binom52", r"\boxed{10}", r"\boxed{52}"),
        ("10", r"\boxed{\binom5{2}}", r"\boxed{\binom53+1}"),
        ("[1, 5)", r"\boxed{1 \le x < 5}", r"\boxed{1 \le x \le 5}"),
        (r"(0, \infty)", r"\boxed{x > 0}", r"\boxed{x < 0}"),
        (r"\{1, 2\}", r"\boxed{2, 1}", r"\boxed{1 < x < 2}"),
        (
            r"x=\frac{-1\pm\sqrt5}{2}",
            r"\boxed{\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}}",
            r"\boxed{\frac{-1+\sqrt5}{2}}",
        ),
        (r"\frac{-1\pm\sqrt5}{2}", r"\boxed{x = \frac{-1\pm\sqrt{5}}{2}}", r"\boxed{x = \frac{1\pm\sqrt{5}}{2}}"),
        ("42", r"Therefore the total cost is \$42.", r"Therefore the total cost is \$24."),
        ("42", r"So 42\% of them are left.", r"So it is 41\% or 42\%."),
        (r"\frac{3}{4}", r"The answer is $\frac34$ of the total.", r"The answer is twice $\frac34$."),
        (r"\frac{3}{4}", r"So the probability is \(\frac34\).", r"So the probability is \(\frac43\)."),
        ("2.5", r"\boxed{2{,}5}", r"\boxed{2, 5}"),
        ("2500", r"\boxed{2{,}500}", r"\boxed{2{,}5}"),
        (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\boxed{(1, -2)}", r"\boxed{(-2, 1)}"),
        (
            "(1, -2)",
            r"\boxed{\mathbf v = \begin{bmatrix} 1 \\ -2 \end{bmatrix}}",
            r"\boxed{\begin{pmatrix}1&-2\end{pmatrix}}",
        ),
        ("(1, -2)", r"\boxed{\left\langle 1, -2 \right\rangle}", r"\boxed{\langle -2, 1 \rangle}"),
        (
            r"\frac\pi4 + k\pi\ (k \in \mathbb Z)",
            r"\boxed{\pi k + \frac\pi4,\quad k\in\mathbb{Z}}",
            r"\boxed{k, k\in\mathbb{Z}}",
        ),
        ("3", r"\boxed{x = 3}", r"\boxed{\ge 3}"),
        (r"x \ge 3", r"\boxed{\geq 3}", r"\boxed{3}"),
        (r"\frac\pi4", r"\boxed{\frac{\pi}{4}}", r"\boxed{\frac{\pi}{2}}"),
        (r"\frac{\sqrt{\theta}}{a}", r"\boxed{\sqrt\theta \cdot \dfrac1a}", r"\boxed{\frac a{\sqrt\theta}}"),
        (r"5\text{ hours}", r"\boxed{5}", r"\boxed{5\text{ minutes}}"),
        (r"5\text{ cm}^2", r"\boxed{5\text{ cm}}", r"\boxed{5\text{ cm}^3}"),
        (r"\frac12\%", r"\boxed{0.5\%}", r"\boxed{\$0.50}"),
        ("2.5", r"\boxed{2,5}", r"\boxed{2,50 + 1}"),
        ("2.5 cm", r"\boxed{2,5\text{ cm}}", r"\boxed{2,5\text{ m}}"),
        ("2+3t", r"\boxed{3t+2}", r"\boxed{5}"),  # letters that math-verify takes for units at an end
        ("1.5m", r"\boxed{\frac{3m}{2}}", r"\boxed{\frac{2m}{3}}"),
        ("3t", r"\boxed{t \cdot 3}", r"\boxed{3}"),
        ("2cx+2c", r"\boxed{2(x+1)c}", r"\boxed{2(x+1)}"),
        ("5 m", r"\boxed{5}", r"\boxed{5\text{ cm}}"),
        (r"5\text{ km}", r"\boxed{5\text{ kilometers}}", r"\boxed{5m}"),
        (r"12\text{ ft}^2", r"\boxed{12 square feet}", r"\boxed{12 cubic feet}"),
        ("60 km/h", r"\boxed{60 kilometers per hour}", r"\boxed{60 m/s}"),
        (r"10\sqrt3\text{ m}", r"\boxed{10\sqrt{3} m}", r"\boxed{3\sqrt{10} m}"),
        ("2+3i", r"\boxed{3 i + 2}", r"\boxed{3 i - 2}"),
        (r"1+\sqrt2", r"\boxed{(1+\sqrt2) m}", r"\boxed{(1+2m)}"),  # and units that are no variables
        (r"10-\sqrt2 m", r"\boxed{10-\sqrt2\text{ meters}}", r"\boxed{10-2m}"),
        ("128", r"\boxed{2^{10-3} g}", r"\boxed{128-g}"),
        (r"\frac53", r"\boxed{2 - \frac13 h}", r"\boxed{2-\frac13h}"),
        ("5 m", "The ball is 5 m high, so the answer is 5 m.", r"\boxed{5 cm}"),
        ("2", r"\boxed{3.2 m - 1.2 m = 2 m}", r"\boxed{3.2m-1.2}"),
        ("5", r"\boxed{s = 5 s}", r"\boxed{5s^2}"),
        ("5 minutes", r"\boxed{5m}", r"\boxed{5 s}"),
        ("5 km", r"\boxed{5km}", r"\boxed{5m}"),
        ("10", r"\boxed{10 c}", r"\boxed{1,0}"),
        (r"\frac{45}{2}^\circ", r"\boxed{22.5°}", r"\boxed{22.5\%}"),
        (r"\sin 60^\circ", r"\boxed{\frac{\sqrt3}{2}}", r"\boxed{\sin 60}"),
        (r"4\cos36° - 2", r"\boxed{\sqrt5 - 1}", r"\boxed{\sqrt5 + 1}"),
        (r"\sin^{2} 30^{\circ}", r"\boxed{0.25}", r"\boxed{0.5}"),
        (r"\lg 2", r"\boxed{\log_{10} 2}", r"\boxed{2}"),
        (r"(\frac12, \infty)", r"\boxed{x > \frac12}", r"\boxed{x \ge \frac12}"),
        ("1, 2", r"\boxed{2, 1}", r"\boxed{1 < x < 2}"),
        (r"\{x \mid x > 2\}", r"\boxed{(2,\infty)}", r"\boxed{2}"),
        (r"[-1,2)", r"\boxed{\left\{x \in \mathbb{R} \,|\, -1 \le x < 2\right\}}", r"\boxed{\{x : -1 < x < 2\}}"),
        ("Rs. 1200", r"\boxed{₹1,200}", r"\boxed{\$1200}"),
        (r"{\bf 12}", r"\boxed{\color{blue}{12}}", r"\boxed{\underline{13}}"),
        ("x=1, y=2", r"\boxed{(1,2)}", r"\boxed{(2,1)}"),
        ("y=2, x=1", r"\boxed{(1,2)}", r"\boxed{2, 1}"),
        ("x_1=1, x_2=2", r"\boxed{2, 1}", r"\boxed{2, 2}"),
        ("(10,3)", r"\boxed{n=10, k=3}", r"\boxed{n=3, k=10}"),  # no order of the alphabet
        (r"(3,1)", r"\boxed{x=3, y=1}", r"\boxed{\begin{cases}x+y=4\\x-y=2\end{cases}}"),  # the question's equations
        (r"\begin{cases}x=1\\y=2\end{cases}", r"\boxed{x=1, y=2}", r"\boxed{2}"),
        (r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.", r"\boxed{(1,2)}", r"\boxed{(2,1)}"),
        (r"\left(\begin{array}{r}-1\\2\end{array}\right)", r"\boxed{\begin{pmatrix}-1\\2\end{pmatrix}}", r"\boxed{2}"),
        (
            "12",
            r"\boxed{\begin{aligned}x&=3\cdot4\\&=12\end{aligned}}",
            r"\boxed{\begin{aligned}x&=12\\y&=3\end{aligned}}",
        ),
        (
            r"f(x)=\begin{cases}x & x>0\\-x & x\le 0\end{cases}",
            r"\boxed{f(x)=\begin{cases}x & x>0\\-x & x\le 0\end{cases}}",
            r"\boxed{0}",
        ),
        (r"f_{\max} = 12", r"\boxed{f_{\max}=12.0}", r"\boxed{f_{\min}=12}"),
        ("12", r"\boxed{f_{\text{max}} = 12}", r"\boxed{f_{\max} = 3, f_{\min} = 12}"),
        ("12", r"\boxed{\therefore 12}", r"\boxed{\max f = 3 \text{ and } \min f = 12}"),
        ("12", r"\boxed{\text{The answer is } 12}", r"\boxed{\text{It is not } 12}"),
        ("12", r"\boxed{\deg P = 12}", r"\boxed{\deg P \not= 12}"),
    ],
)
def test_math_verify_reads_what_responses_write(reference: str, right: str, wrong: str) -> None:
    assert earned("math_verify", reference, right) == 1
    assert earned("math_verify", reference, wrong) == 0


UNREAD = r"\tg 2;3+\tg 2;\operatorname{tg} 2;\operatorname{cis} 2;\sqrt[3] 2;2\sqrt[3] 2;"
UNREAD += r"\oint 2;x \not= 2;x \mid 2;2\#2;3 \foo 2"


@pytest.mark.parametrize(
    "stated", [*UNREAD.split(";"), r"\begin{cases}1 & n \text{ odd}\\2 & n \text{ even}\end{cases}"]
)
def test_what_cannot_be_read_as_a_whole_is_not_the_last_number_in_it(stated: str) -> None:
    assert earned("math_verify", "2", rf"\boxed{{{stated}}}") == earned("math_verify", stated, r"\boxed{2}") == 0
    assert earned("math_verify", stated, rf"\boxed{{{stated}}}") == 1


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (r"\frac{2^{2005}+1}{3\cdot 2^{2006}}", r"\frac16+\frac{1}{3\cdot 2^{2006}}", r"\frac{1}{3\cdot 2^{2006}}"),
        (r"1-\frac{1}{2^{60}}", r"\frac{2^{60}-1}{2^{60}}", r"1-\frac{1}{2^{61}}"),
        (r"\frac{3^{60}}{2^{100}}", r"3^{60}\cdot 2^{-100}", r"\frac{3^{61}}{2^{100}}"),
        (r"\sqrt{10^{40}+1}", r"(10^{40}+1)^{1/2}", r"10^{20}"),
        (r"(2^{-99}, 1)", r"(\frac{1}{2^{99}}, 1)", r"(\frac{1}{2^{98}}, 1)"),
        (r"\sqrt{0.3}", r"\sqrt{\frac{3}{10}}", r"\sqrt{\frac{1}{3}}"),
        (r"\sum_{n=1}^\infty \frac{1}{n^2}", r"\frac{\pi^2}{6}", r"\frac{\pi^2}{7}"),
    ],
)
def test_no_power_of_an_exact_answer_is_rounded_away(reference: str, right: str, wrong: str) -> None:
    assert earned("math_verify", reference, rf"\boxed{{{right}}}") == 1
    assert earned("math_verify", reference, rf"\boxed{{{wrong}}}") == 0


@pytest.mark.parametrize("word", ["factorial", "squared", "halves", "thirds", "quarters"])
def test_words_that_change_a_number_are_no_units(word: str) -> None:
    assert earned("exact_match", "5", rf"\boxed{{5\text{{ {word}}}}}") == 0


@pytest.mark.parametrize(
    "stated",
    [r"5\text{" + 20_000 * "~", "it is not " + 20_000 * "5", "5" + 20_000 * "( ", "5" + 20_000 * " " + "x"],
    ids=["text", "number", "((", "gap"],
)
def test_a_long_answer_takes_no_time(stated: str) -> None:
    begun = time.process_time()
    assert earned("exact_match", "5", f"Answer: {stated}") == 0
    assert not contradicts(stated, "5")
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "stated", [r"\boxed{18\text{ dollars}}", r"\boxed{18 \, \text{cm}^2}", r"\boxed{18\mathrm{~km/h}}", "Answer: 18 m²"]
)
def test_exact_match_takes_a_unit_however_it_is_set(stated: str) -> None:
    assert earned("exact_match", "18", stated) == 1
    assert earned("exact_match", "81", stated) == 0


def test_a_whole_response_is_looked_at_where_that_is_asked_for() -> None:
    for response, final in ((RUN_ON, 1), (INSIDE, 0)):
        assert earned("exact_match", "73", response) == final
        assert earned("exact_match", "73", response, answer_from="response") == 1 - final


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (r"2\sqrt{3}", r"so it is \boxed{2\sqrt{3}}", "Answer: 2"),
        (r"6\pi", r"\boxed{6\pi}", "Answer: 6"),
        ("6π", r"\boxed{6\pi}", "Answer: 6"),
        ("2√3", r"\boxed{2\sqrt{3}}", "Answer: 2"),
        ("x²", r"\boxed{x^2}", r"\boxed{x}"),
        ("3+4i", r"\boxed{3+4i}", "Answer: 3"),
        (r"1 - \sqrt{2}", r"Answer: $1-\sqrt{2}$", "Answer: 1"),
        ("(1, 2)", r"\boxed{(1,2)}", "Answer: 2"),
        (r"(-\infty, 3]", r"\boxed{(-\infty, 3]}", "Answer: 3"),
        ("[2, 4]", r"\boxed{[2,4]}", "Answer: 4"),
        ("2^{10}", "Answer: 1024", "Answer: 2"),
        ("2**10", "Answer: 1024", "Answer: 2"),
        ("5 million", "Answer: 5,000,000", "Answer: 5"),
        ("1e5", "Answer: 100000", "Answer: 5"),
        ("5!", r"\boxed{5!}", "Answer: 5"),
        ("y = 2x+3", r"\boxed{y = 2x+3}", "Answer: 3"),
        ("x=3 or x=5", r"\boxed{x=5 or x=3}", "Answer: 5"),
        ("12:30", "Answer: 12:30", "Answer: 12"),
        ("1,2,3", "Answer: 3, 2, 1", "Answer: 3"),
        (r"\{1,2\}", r"\boxed{1, 2}", "Answer: 2"),
        ("[1, 2, 3]", "Answer: 1, 2, 3", "Answer: 3"),
        ('["18"]', "Answer: 18", "Answer: 1"),
        ('["3", "5"]', r"\boxed{3, 5}", "Answer: 5"),
        ("2 1/2", r"\boxed{2.5}", "Answer: 2"),
        (r"$\frac{1}{2}$", "Answer: 0.5", "Answer: 2"),
        (r"\(\frac{1}{2}\)", r"\boxed{\frac{2}{4}}", "Answer: 1"),
        (r"We see that it is $\boxed{\frac{1}{2}}$.", "Answer: 1/2", "Answer: 1"),
        ("18.0", "Answer: 18", "Answer: 180"),
        ("1,234.50", "Answer: 1234.5", "Answer: 1"),
        (r"3,\!000", "Answer: 3000", "Answer: 3"),
        ("10 000", r"\boxed{10000}", "Answer: 10"),
        (r"10\,000", r"\boxed{10{,}000}", r"\boxed{1000}"),
        ("1234567.5", r"\boxed{1\,234\,567.5}", r"\boxed{1\,234}"),
        ("10000", "Answer: 10\u202f000", "Answer: 10\u202f00"),
        (r"1\,000\text{ cm}", "Answer: 1000", "Answer: 1"),
        ("2 100/200", r"\boxed{2.5}", r"\boxed{10.5}"),
        (r"0.\overline{3}", r"\boxed{\frac{1}{3}}", r"\boxed{0.3}"),
        (r"-3.1\overline{45}", "Answer: -173/55", r"\boxed{-3.145}"),
        (r"\frac{1}{6}", r"\boxed{0.1\bar6}", r"\boxed{0.\overline{16}}"),
        ("3.5", r"\boxed{3\ 1/2}", r"\boxed{3\ 1/3}"),
        ("0.(142857)", r"\boxed{\frac17}", "Answer: 142857"),
        (r"90^\circ", "Answer: 90°", "Answer: 9°"),
        ("50%", r"\boxed{50\%}", "Answer: 5"),
        (r"10^\circ", "Answer: 10", "Answer: 1"),
        (r"3\text{ cm}", "Answer: 3", "Answer: 4"),
        (GSM8K.format("1,750"), "Answer: 1750", "Answer: 750"),
        ("Paris", "Answer: Paris", "Answer: Pairs"),
        (r"\text{Paris}", r"\boxed{Paris}", r"\boxed{\text{Lyon}}"),
        ("B", r"\boxed{\text{(B) } 5}", r"\boxed{\text{(C) } 5}"),
        ("no solution", r"\boxed{\text{No solution}}", "Answer: 0"),
        ("B", "Answer: (B) Lyon", "Answer: (A) B"),
        ("(B)", r"\boxed{B}", "Answer: C"),
        ("Yes", "Answer: Yes", "Answer: No"),
        ("B. Paris", "Answer: B", "Answer: A"),
        ("(B) Paris", r"\boxed{\text{(B)}}", "Answer: P"),
        ("3 x 10^8", r"\boxed{3\times10^8}", "Answer: 3"),
        ("1200", "Answer: 12 hundred", "Answer: 12"),
        ("18", "Answer: 18 m/s", "Answer: 18 m/s or 19 m/s"),
        ("18", "Answer: 18 km/h.", "Answer: 81 km/h."),
        ("18 cm^2", "Answer: 18", "Answer: 2"),
        ("2516_8", r"\boxed{2516_{8}}", r"\boxed{2516_9}"),
        (r"6:00 \text{ a.m.}", "Answer: 6:00 AM", r"\boxed{6:00 \text{ p.m.}}"),
        (r"\textbf{(B)}\ \frac{1}{2}", r"\boxed{0.5}", r"\boxed{2}"),
        ("pi/2", r"\boxed{\frac{\pi}{2}}", "Answer: 2"),
        (r"\frac{3\pi}{4}", "Answer: 3*pi/4", "Answer: 3/4"),
        ("sin(x) + ln(2)", r"\boxed{\ln 2 + \sin x}", r"\boxed{\sin x}"),
        ("3/4 cup", "Answer: 3/4", "Answer: 4"),
        ("1 3/4 cups", "Answer: 1 3/4", "Answer: 3/4"),
        ("8 cm³", r"\boxed{8 \text{ cm}^3}", r"\boxed{3}"),
        (r"The sum is $\frac{1}{2}$.", "Answer: 1/2", "Answer: 2"),
        (r"$(-\infty, 3]$ is its domain", r"\boxed{(-\infty,3]}", r"\boxed{3}"),
        ("at least $5$", "Answer: at least $5$", "Answer: 5"),
        ("$3$ million", "Answer: $3$ million", "Answer: 3"),
        ('{"target": ["3", "5"]}', r"\boxed{3, 5}", "Answer: 5"),
        ("6.6e-34", r"\boxed{6.60 \times 10^{-34}}", r"\boxed{3.1e-34}"),
        ("0.0000001", "Answer: 1e-7", "Answer: 0.0000002"),
        (r"\frac{1}{2^{99}}", r"\boxed{2^{-99}}", r"\boxed{\frac{1}{2^{98}}}"),
        (r"\frac{1}{1296}", r"\boxed{0.000772}", r"\boxed{0.000872}"),
        (r"\frac{1}{10!}", r"\boxed{2.755731922\times10^{-7}}", r"\boxed{2.1\times10^{-7}}"),
        (r"\frac{1}{649740}", r"\boxed{0.0000015}", r"\boxed{0.0000018}"),
        ("e^{-10}", r"\boxed{0.0000454}", r"\boxed{e^{-13}}"),
        ("6.626e-34", r"\boxed{6.63\times10^{-34}}", "Answer: 0"),
        (r"y = 2\times10^{-9}", r"\boxed{2\times10^{-9}}", r"\boxed{3\times10^{-9}}"),
        (r"0.05\%", r"\boxed{0.05}", r"\boxed{0.5}"),
        (r"1, 2, \ldots, n", r"\boxed{1,2,\ldots,n}", r"\boxed{1, 3, \ldots, n}"),
        (r"\{1, 2, \ldots, 10\}", r"\boxed{\left\{1, 2, ..., 10\right\}}", r"\boxed{\{1, 2, ..., 9\}}"),
        (r"n = 2, 4, 6, \ldots", r"\boxed{2, 4, 6, \dots}", r"\boxed{2, 4, 6}"),
        (r"S = 1+\frac12+\cdots = 2", "Answer: 2", "Answer: 1"),
        (r"1 - \frac{1}{\mathrm{e}}", r"\boxed{1-\frac1e}", r"\boxed{1+\frac1e}"),
    ],
)
def test_math_verify_reads_references_as_data_sets_write_them(reference: str, right: str, wrong: str) -> None:
    assert earned("math_verify", reference, right) == 1
    assert earned("math_verify", reference, wrong) == 0
    assert earned("math_verify", reference, format_answer(reference)) == 1


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (GSM8K.format("19"), "Answer: 19", "Answer: 24"),
        (GSM8K.format("1,750"), r"so \boxed{1750}", "Answer: 1"),
        ("18.0", "Answer: 18", "Answer: 180"),
        ("3 hours", "Answer: 3", "Answer: 3 days"),
        ('["NYC", "New York"]', "The answer is New York.", "Answer: York"),
        ("True", "**Answer:** true", "Answer: false"),
        ("The answer is 5.", "5", "4"),
        ("0.5", "Answer: .50", "Answer: 5"),
        ("-3", "Answer: −3", "Answer: 3"),
        ("-3", "Answer: –3", "Answer: 3"),
        ("1/2", "Answer: ½", "Answer: 2"),
        ("1½", "Answer: 1 1/2", "Answer: 1/2"),
        ("10000", r"\boxed{10\,000}", r"\boxed{10\,00}"),
        ("D", "The correct option is D.", "The correct option is E."),
        ("D", "The answer is option D", "The answer is definite"),
        ("E. coli", "Answer: E. coli", "Answer: E. faecalis"),
        ("C", r"\boxed{\text{C}}", "Answer: Carbon"),
        (r"\textbf{(C)}", r"\boxed{\mathrm{C}}", r"\boxed{\mathrm{D}}"),
        ("10 000", "Answer: 10000", "Answer: 10"),
        ("(1, 2]", r"\boxed{( 1,2 ]}", r"\boxed{(1, 2)}"),
        ("x = 5", "Answer: x=5", "Answer: x=-5"),
        ("x²", "Answer: x^2", "Answer: x"),
        ("5 dollars", "Answer: $5", "Answer: €5"),
        ("€50", "Answer: 50 euros", "Answer: 50 dollars"),
        ("30 percent", "Answer: 30%", "Answer: 3"),
        ('{"target": ["NYC", "New York"]}', "Answer: NYC", "Answer: York"),
        (r"90^\circ", "Answer: 90°", "Answer: 9°"),
        (r"1+2+\cdots+n", "Answer: 1 + 2 + ... + n", "Answer: 1 + 3 + ... + n"),
        (r"3.14159\ldots", "Answer: 3.14159", "Answer: 3.1415"),
        ("2.718…", "Answer: 2.718...", "Answer: 2.719..."),
        ("caf\u00e9", "Answer: cafe\u0301", "Answer: cafe"),
        ("(1, 2)", "答案：（１，２）", "答案：（２，１）"),
        ("B", "答案：（Ｂ）", "答案：（Ｃ）"),
        ("5", "답: 5", "Answer: 5d"),
        ("5 days", "Answer: 5d", "Answer: 5h"),
        ("12", r"\boxed{12^{\circ}C}", r"\boxed{1^{\circ}C}"),
        (r"12^{\circ}C", r"\boxed{12}", r"\boxed{12^{\circ}F}"),
        ("12 °C", "Answer: 12℃", "Answer: 12 °F"),
    ],
)
def test_exact_match_reads_references_as_data_sets_write_them(reference: str, right: str, wrong: str) -> None:
    assert earned("exact_match", reference, right) == 1
    assert earned("exact_match", reference, wrong) == 0
    assert earned("exact_match", reference, format_answer(reference)) == 1


@pytest.mark.parametrize(
    ("reference", "stated"),
    [
        ("All multiples of $3$", "3"),
        ("the square root of $5$", "5"),
        ("negative $5$", "5"),
        ("-$5$", "5"),
        ("$5$!", "5"),
        ("Twice $5$", "5"),
        ("the reciprocal of $5$", "5"),
        (r"twice $\pi$", r"\pi"),
        ("two to the power $5$", "5"),
        ("divisible by $7$", "7"),
        ("increasing by $5$ each time", "5"),
        ("everything above $5$", "5"),
        ("nicht $5$", "5"),
        ("doesn't equal $5$", "5"),
        ("Thursday, $5$ pm", "5"),
        ("$5$ but also six", "5"),
        ("$10$ thousands", "10"),
        ("$2$ hundreds", "2"),
        ("$5$ dozens", "5"),
        ("$2$ fifths", "2"),
    ],
)
def test_a_sentence_that_says_more_than_its_formula_is_not_its_formula(reference: str, stated: str) -> None:
    assert earned("math_verify", reference, f"\\boxed{{{stated}}}") == 0


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
def test_a_full_width_comma_separates_and_no_full_width_mark_is_a_factorial(reward: str) -> None:
    assert earned(reward, "3, 5", r"\boxed{３，５}") == 1
    assert earned(reward, "AC", "答案：Ａ，Ｃ") == 1
    for reference, response in (("3.5", "3，5"), ("1000", "1，000"), ("120", "5！")):
        assert earned(reward, reference, f"\\boxed{{{response}}}") == 0


def test_what_takes_time_to_evaluate_is_no_number_whose_size_is_looked_at() -> None:
    endless = parse_latex(r"\boxed{\sum_{k=1}^{\infty}\frac{(-1)^{k}}{\sqrt{k}}}")
    assert _number(endless) is None and _number([]) is None and _number(parse_latex(r"\boxed{x}")) is None
    assert _number(parse_latex(r"\boxed{y = 2^{-9}}")) is not None


@pytest.mark.parametrize(
    "reference",
    ["The answer is $5$.", "Therefore, the final value is $5$", "So its sum: $5$", "$5$ is the result", "$5$ cm"],
)
def test_a_sentence_that_says_no_more_than_its_formula_is_its_formula(reference: str) -> None:
    assert earned("math_verify", reference, r"\boxed{5.0}") == 1


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
@pytest.mark.parametrize(
    ("reference", "stated", "right"),
    [
        ('{"city": "Paris"}', '{"country": "Paris"}', False),
        ('{"city": "Paris"}', '{"city": "Paris"}', True),
        ('{"city": "Paris"}', "Paris", True),
        ("Paris", '{"city": "Paris"}', False),
        ('{"x": [1, 2]}', '{"y": [1, 2]}', False),
        ('{"x": [1, 2, 3]}', '{"y": [1, 2, 3]}', False),
        ('{"x": [1, 2]}', "[1,2]", True),
        ('{"x": 5}', '{"y": 5}', False),
        ('{"x": 5}', "5", True),
        ('{"x": true}', "True", False),
        ('{"x": true}', '{"x": true}', True),
        ('{"x": null}', "None", False),
        ('{"x": ""}', '{"x": ""}', True),
        ('{"x": ""}', "..", False),
        ('{"x": {"a": 1}}', "{'a': 1}", False),
        ('{"x": {"a": 1}}', '{"x": {"a": 1}}', True),
        ('{"x": ["a", ["b"]]}', "['a', ['b']]", False),
        ('{"x": ["a", ["b"]]}', '{"x": ["a", ["b"]]}', True),
    ],
)
def test_a_reference_may_name_its_answer_and_a_response_states_what_it_says(
    reward: str, reference: str, stated: str, right: bool
) -> None:
    assert earned(reward, reference, f"Answer: {stated}") == right


@pytest.mark.parametrize(("stated", "reference"), [("}", "]"), ("] }", "]"), ("end}", "end"), (r"[1,2\}", "[1,2")])
def test_a_bracket_is_part_of_an_answer(stated: str, reference: str) -> None:
    assert earned("exact_match", stated, f"Answer: {stated}") == 1
    assert earned("exact_match", reference, f"Answer: {stated}") == 0
