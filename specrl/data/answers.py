"""How responses and data sets state a final answer, how it is extracted, and when two answers are the same.

Only the last statement counts that follows the thoughts (`</think>`) and precedes any new question that a base model
asks itself. `math_verify` and `exact_match` read references by the same rules, so that whole solutions (GSM8K's `####
19`, MATH's `\\boxed{19}`) serve as references.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from decimal import Decimal
from unicodedata import normalize

_NAME = r"(?:\b(?:answer|antwort|respuesta|réponse|resposta|risposta|ответ)\b|答案|答え|정?답)"
_LABELLED = re.compile(
    rf"{_NAME}[*_]*(?: is| ist|是|为)?(?: ?\([^()\n]{{1,40}}\))?\s{{0,2}}[:：](?:\*\*|__)?[^\S\n]*(.*)", re.I
)
_HEADING = re.compile(rf"^[#*_ \t]{{1,9}}(?:the )?(?:final |correct )?{_NAME}[*_ \t]*$()", re.I | re.M)
_HASHES = re.compile(r"^[ \t]*####[ \t]*([^#\s].*)", re.M)
_IS = r"(?:(?:is|equals|should be|would be|ist|es|est)(?: therefore)?:?(?=\s)|[是为])(?:[^\S\n]*|\s{0,3}(?=[$\\]))"
_SENTENCE = re.compile(
    rf"(?:\b(?:result|solution|option|choice) |{_NAME} ?){_IS}(\S.*?)(?:\.(?:\s|$)|。|$)", re.I | re.M
)
_WITHIN_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{[^{}]*$")  # `\text{The answer is } 5`
_DISPLAYED = re.compile(r"^[ \t]*(\$\$|\\\[)[ \t]*\n(.+)\n[ \t]*(\$\$|\\\])", re.M)  # on separate lines
_UNBRACED = re.compile(r"\\boxed +(-?[\d\\][^\s$]*)")  # as MATH has some: `$\boxed 2$`
_RUN_ON = re.compile(
    r"\n\s*(?:Question|Q|Human|User|Problem|Exercise|Instruction)[ \t]*\d*[ \t]*[:：]"
    r"|\n#{1,4} (?:Question|Problem|Instruction)"
)
_ENDS = re.compile(r"<\|(?:im_start|im_end|endoftext|eot_id|user)\|>|</s>|\[INST\]")
_THOUGHTS_BEGIN = re.compile(r"<(?:think|thinking|thought|reasoning|\|begin_of_thought\|)>")
_THOUGHTS_BEGUN = re.compile(rf"({_THOUGHTS_BEGIN.pattern})\s*\Z")  # added by the prompt, as some chat templates do
_THOUGHTS_END = re.compile(r"</(?:think|thinking|thought|reasoning)>|<\|end_of_thought\|>")
_WRAPPERS = (
    *((mark, mark) for mark in ("$$", "$", "**", "```", "`", '"')),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    *((rf"\{font}{{", "}") for font in ("text", "textbf", "mathrm", "mathbf", "boldsymbol", "bm", "underline")),
)
_NO_UNITS = {"hundred", "thousand", "million", "billion", "trillion", "dozen", "pi", "sqrt", "or", "and"}
_NO_UNITS |= {"factorial", "squared", "cubed", "half", "halves", "third", "thirds", "quarter", "quarters"}
_PLAIN = r"(?:the|an?|is|are|its?|so|thus|hence|therefore|final|answer|value|result|solution|sum|total|domain|range|of"
_PLAIN += r"|we|get|have|obtain|find|then|that|this|probability|area|volume|length|distance|ratio|number|equals)"
"""A word that adds nothing to the formula in its sentence; others, such as `twice`, may change the meaning."""
_IN_SENTENCE = re.compile(rf"(?:{_PLAIN}[,:]?\s+)*(?:\$\$?|\\\()([^$]+?)(?:\$\$?|\\\))(?:\s+{_PLAIN})*\s*\.?", re.I)
_FUNCTIONS = {"sin", "cos", "tan", "cot", "log", "exp", "sqrt", "inf", "infinity"}
_GAP = r"(?:\\[ ,;]|\\q?quad|[\s~])"
_SET_CHOICE = re.compile(
    rf"(?i)^\\(?:text|mathrm|mathbf)(?:bf|it|rm)?\{{\s*\(([a-j])\)(?:\s*\}}(?:{_GAP}|$)|\s+\}}){_GAP}*+"
    r"(?![+*/^=<>,:&|×·÷∪∩∈→≤≥]|[-−–](?:\s|\\text|\\math)|(?:or|and)\b|.*\([a-j]\)\s*\}|\\(?!left\b|[${]|"
    r"(?:[dt]?frac|sqrt|text|math|pi|log|ln|sin|cos|tan|angle|triangle|overline|d?binom|infty)))"
)
"""The letter of a choice in its own font, as in competitions: `\\textbf{(B)}\\ 5`; no operator follows."""


def _column(found: re.Match[str]) -> str:
    rows = [row.strip() for row in found[1].split(r"\\")]
    return f"({', '.join(filter(None, rows))})" if len(rows) > 1 else found[0]


def _system(found: re.Match[str]) -> str:
    rows = [row.strip().replace("& ", "&").replace("&=", "=").strip("&") for row in found[2].split(r"\\")]
    listed = ", ".join(filter(None, rows)).replace(", =", " =")
    are_values = all(re.match(r"[a-zA-Z]?\s*=|[^=]*$", row) for row in rows)  # not the equations of the question
    return found[0] if "&" in listed or "matrix" in found[1] or not are_values else listed


_DOTS = r"\\[lc]?dots[bcimo]?(?![a-zA-Z])|…"
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_TOKEN = r"\s*(\\(?!sqrt|[dt]?frac|text|math|left|[dt]?binom)[a-zA-Z]+|[\da-zA-Z])"  # an argument without braces
_TO_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"^{_GAP}+|(?:{_GAP}|\\){{1,9}}$", ""),
        (r"^(?:\\left\s*\\\{)?\s*\\begin\{(\w+)\}(?:\{[lcr|]+\})?(.*?)\\end\{\1\}(?:\s*\\right\s*\.?)?$", _system),
        (
            rf"^(?:\\left)?\\\{{{_GAP}*([a-z])(?:\s*\\in\s*\\mathbb\s*\{{?R\}}?)?{_GAP}*(?:\\mid|\\vert|[|:]){_GAP}*"
            r"(?=[^,]*\1[^,]*$)(.*?)\s*(?:\\right)?\\\}$",
            r"\2",
        ),
        (r"√\s*\(([^()]*)\)|√\s*(\d+|\w)", r"\\sqrt{\1\2}"),
        (r"^[−–]", "-"),
        (_SET_CHOICE, ""),
        (r"^([^{}]*\d)\{,\}(?=\d{1,2}\b[^{}]*$)", r"\1."),  # a decimal comma; before three digits it may be a separator
        (
            r"(?:\\left)?[(\[]\\begin\{array\}\{[lcr]+\}(.*?)\\end\{array\}(?:\\right)?[)\]]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"^(?:.*=)?\s*\\begin\{[pbB]?matrix\}([^&]*)\\end\{[pbB]?matrix\}$", _column),
        (r"^(?:.*=)?\s*(?:\\left)?(?:\\langle|⟨)(.*?)(?:\\right)?(?:\\rangle|⟩)$", r"(\1)"),
        (rf"(?<=[^\s,;])\\?\s?[,;(]{_GAP}*\(?{_GAP}*[a-z]\s*\\in\s*(?:\\math(?:bb|bf))?\s*\{{?[Zℤ]\}}?\)?$", ""),
        (rf"\\([dt]?frac|sqrt){_TOKEN}", r"\\\1{\2}"),
        (rf"(\\[dt]?frac\{{[^{{}}]*\}}){_TOKEN}", r"\1{\2}"),
        (r"^(?=\\(?:ne|neq|[lg]eq?|[lg]t|[lg]eqslant)\b)", "x"),  # `\ge 3` is not 3
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", "π"),
        (r"(?<![\\a-zA-Z])(exp|log|ln|sin|cos|tan|cot)(?= ?\()", r"\\\1"),
        (r"\\varnothing\b", r"\\emptyset"),
        (r"\\(?:bf|large|Large|(?:text)?color\{\w+\})(?![a-zA-Z])\s*", ""),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (
            r"(?<![a-zA-Z\\])\\?(sin|cos|tan|cot|sec|csc)((?:\^\{?\d\}?)?\s*(?:\\left)?[({]?\s*)"
            r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})",
            r"\\\1\2{\\frac{\3\\pi}{180}}",
        ),
        (r"\\(?:mathrm|operatorname)\s?\{([ei])\}", r"\1 "),
        # math-verify drops an ellipsis and, in a list, also the items before it: there it becomes an item.
        (rf"((?:^|[,;{{(\[]){_GAP}*)(?:{_DOTS}|\.{{3,}}){_GAP}*(?=[,;)\]}}]|\\[}}]|\\right|$)", r"\1\\Xi "),
        (r"\*\*", "^"),
        (r"\\([dt]?)binom(\d)(?=[\d{])", r"\\\1binom{\2}"),
        (r"(\\[dt]?binom\{\d\})(\d)", r"\1{\2}"),
        (r"^((?:(?!\\pm)[^,;])*)\\pm((?:(?!\\pm)[^,;])*)$", r"\1+\2, \1-\2"),
        *((rf"(?<=\d) ?{word}\b", rf"\\times 10^{{{power}}}") for word, power in _POWERS.items()),
        (r"(?<=\d) ?x ?(?=10\^)", r"\\times "),
        (r"(?<=\d) (?=i(?![a-zA-Z]))", ""),
        (r"^(-?\d+)(?:\\? )+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
        (r"^(-?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})$", r"\1 \\times 10^{\2}"),
    )
]
_LEAD = re.compile(
    r"(?:\\therefore|\\approx|≈|=>?|→|\(?\w\)(?=\s)|\\text\{[^{}]*(?:is|:)\s*\}"
    r"|(?:(?!(?:\\text\{\s*)?\b(?:and|or|not|neq?|[lg]eq?)\b)[^,;=<>≤≥≠{}!:]|\{(?:[^{}]|\{[^{}]*\})*\})*=)\s*(?=.)"
)
"""What may precede an answer's value without being part of it: `\\therefore 5`, `f_{\\max} = 5`."""
_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_TEX = str.maketrans(
    {"²": "^2", "³": "^3", "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup "}
)
_SIGNS = {"dollar": "$", "dollars": "$", "usd": "$", "euro": "€", "euros": "€", "percent": "%", "degrees": "°"}
_SIGNS |= {"rs": "₹", "rupees": "₹"}
_WIDTHS = {0x3000: " ", **{code: chr(code - 0xFEE0) for code in range(0xFF02, 0xFF5F)}, 0xFF0C: ", ", 0x2103: "°C"}
"""Full-width characters and their ASCII forms, which Chinese and Japanese models mix: `（１，２）`. Such a comma
separates items, and such an exclamation mark is no factorial."""
_TYPED = str.maketrans({"−": "-", "–": "-", "²": "^2", "³": "^3"})
_GROUPED = re.compile(
    r"(?<![\w.^])\d{1,3}(?:([ \u00a0\u2007\u2009\u202f~'’_]|\\[,;:! ])\d{3})(?:\1\d{3})*(?![\d/'’]|[ ]/)"
)
"""A number in groups of three digits, `10 000` or `10\\,000`, without commas, which also separate items."""
_REPEATING = re.compile(
    r"(?<![\w.])(\d{0,20})\.(\d{0,20})(?:\\(?:overline|bar|dot)(?:\{(\d{1,20})\}|(\d))|\((\d{1,20})\))"
)
_CHOICE = re.compile(r"(?:\\(?:text|math)\w*\{)*[(\[]?([a-z]|yes|no|true|false)(?:[)}\]]|[.:](?=\s)|,(?=[a-z]{2})|$)")
_OFFERED = re.compile(r"(?:[Oo]ption |[Cc]hoice )?\(?([A-Ja-j])(?:[):]\s|\.\s(?!\s*(?:[a-z]|[A-Z]\.)))(?!\s*[-+*/^=(])")
"""A reference that includes the choice's text, `(B) Paris`, but not a name: `E. coli`, `J. K. Rowling`."""
_ANOTHER = re.compile(r"\W*(?:(?:or|and)\W*)?([a-j])\)|\W*(?:or|and)\W*([a-j])(?:[}.:](?!\w)|$)")
"""The letter of a further choice: a response that names several has not chosen."""
_APART = [
    re.compile(mark)
    for mark in (
        r"(?<=\d)_\{?(\d+)",
        r"(?<=[\d\W])([ap])\.?\s?m\b",
        r"(%|\\\$|\\circ)",
        r"(second|minute|hour|day|week|month|year)s?\b",
        r"(?<![a-z])([cmk]m|in(?=ch)|f(?=[oe]{2}t)|yard|mile)",
        r"(?<![a-z])(?:[cmk]?m|ft|in|units?|meters|inches|feet)\}?\^\{?([23])",
    )
]
"""Distinctions that math-verify ignores: number bases, a.m. and p.m., signs, units and their powers."""
_FRACTION = re.compile(r"(?<!\d)(\d*)([¼-¾⅐-⅞])")
_UNIT = r"(?:(?:[a-z]{2,}\.?|m)(?:\^[23])?|[dglsh])(?:/[a-z]+(?:\^[23])?)?"
_NUMBER = re.compile(
    rf"([$€£¥₹]?|rs\.? ?)([-+]?(?:\d+ (?=\d+/))?(?:\d*\.)?\d+(?:/\d+)?)((?:\s+{_UNIT}){{0,3}}|\s?(?:%|°(?:\s?[cf])?))"
)
_UNIT_WORD = re.compile(r"(?:(sq|cu)\S* )?(kilo|centi|milli)?([a-z]+?)s?\.?(\^[23])?")
_SYMBOLS = {"meter": "m", "metre": "m", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd"}
_SYMBOLS |= {"mile": "mi", "gram": "g", "liter": "l", "litre": "l"}
_SYMBOLS |= {"second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "day": "d"}
_MEASURED = re.compile(r"(?:[kcm]?[mgl]|in|ft|yd|mi|min|[dhs])(?:\^[23])?(?:/(?:min|[sh])(?:\^2)?)?")
_BEFORE_UNIT = re.compile(r"(?<=\d)(?=(?:[kcm]?[mgl]|min|[dhs])$)")
_POWER = re.compile(r"\^[23]")
_IN_FONT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
# math-verify drops such a letter at the end as a unit; elsewhere it is a variable, or a unit after a blank.
_LAST_LETTER = re.compile(r"(?<=[\d}\s])([cdghlmost])\s*$")
_LETTER = re.compile(r"(?<![a-zA-Z\\'])(?<!\d )[cdghlmost](?![a-zA-Z]|\s*[=$]|\s*$)")


def format_answer(answer: str) -> str:
    """State an answer as demonstrations do; `extract_answer` recovers it up to surrounding spaces."""
    return f"<answer>{answer}</answer>" if "\n" in answer else f"Answer: {answer}"


def close_thoughts(prompt: str, response: str) -> str:
    """Prefix a response with the end of thoughts if its prompt has opened them."""
    begun = _THOUGHTS_BEGUN.search(prompt)
    if begun is None:
        return response
    return f"{'<|end_of_thought|>' if '|' in begun[1] else begun[1].replace('<', '</')}\n{response}"


def final_part(response: str, prompt: str = "") -> str:
    """The part of a response after its thoughts and before a run-on; empty if the thoughts do not end."""
    said = next((part for part in _ENDS.split(after_thoughts(response, prompt)) if part.strip()), "")
    parts = _RUN_ON.split(said)
    own = parts[0] if re.search(r"\d", parts[0]) else said  # if it is no answer, it may introduce the next question
    return next((part for part in parts if _stated(part) is not None), own)


def after_thoughts(response: str, prompt: str = "") -> str:
    """The part of a response after its thoughts, which the prompt may have opened; empty if they do not end."""
    *thoughts, said = _THOUGHTS_END.split(response)
    begun = _THOUGHTS_BEGUN.search(prompt) or _THOUGHTS_BEGIN.search(response)
    return said if thoughts or not begun else ""


def extract_answer(response: str) -> str:
    r"""Extract the answer that a response states.

    In order of precedence: the text of the last `<answer>...</answer>`; the last of `\boxed{...}`, `Answer: ...` (also
    as a heading, in bold Markdown, and in some other languages) and `#### ...`; what follows the last `the answer is`;
    the whole response. An empty box states nothing.
    """
    stated = _stated(response)
    return (response if stated is None else stated).strip()


def _stated(text: str) -> str | None:
    closed = re.split("</answer>", text, flags=re.I)[:-1]
    if tagged := [one for part in closed for one in re.split("<answer>", part, maxsplit=1, flags=re.I)[1:]]:
        return tagged[-1]
    text = _DISPLAYED.sub(r"\1\2\3", text)
    found = [box] if (box := _last_box(text)) else []
    for form in (_LABELLED, _HEADING, _HASHES, _UNBRACED):
        lines = {one.start(): _cut(text, one) for one in form.finditer(text)}
        found += [(start, line) for start, line in lines.items() if line.strip()][-1:]
    if found:
        return max(found, key=lambda one: one[0])[1]
    sentences = [*_SENTENCE.finditer(text)]
    return _cut(text, sentences[-1]) if sentences else None


def _cut(text: str, form: re.Match[str]) -> str:
    stated, start = (
        (form[1], form.start(1)) if form[1] else (text[form.end() :].lstrip().partition("\n")[0], form.end())
    )
    return stated.replace("}", "", 1) if _WITHIN_TEXT.search(text[max(0, start - 99) : start]) else stated


def _last_box(text: str) -> tuple[int, str] | None:
    for opening in [*re.finditer(r"\\(?:f|frame)?box(?:ed)?\s?\{(?!\s*\})", text)][:-21:-1]:  # the last 20
        depth = 1
        for brace in re.finditer(r"[{}]", text[opening.end() :]):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                return opening.start(), text[opening.end() : opening.end() + brace.start()]
    return None


def references(answer: str, *, named: bool = True) -> list[str]:
    """The answers in a reference: the one that a worked solution states, the whole text, and JSON strings."""
    text, items = bare(extract_answer(answer)), None
    with suppress(ValueError, RecursionError):
        items = json.loads(text) if text.startswith(("[", "{")) else None
    if named and isinstance(items, dict) and len(items) == 1:  # as in `{"target": ["Paris"]}`; only in references
        (items,) = items.values()
    values = items if isinstance(items, list) else [items]
    kinds = set(map(type, values))
    if not kinds or not kinds <= {str, int, float}:
        return [text]
    members = [bare(str(value)) for value in values]
    if str not in kinds and len(values) == 2:
        return [json.dumps(values), text]  # numbers in brackets may also be an interval
    return [", ".join(members) or text, text, *filter(None, members if kinds == {str} else [])]


def bare(answer: str) -> str:
    """Strip an answer of what surrounds it, such as dollar signs and Markdown, and of gaps in its numbers."""
    text = normalize("NFC", answer).translate(_WIDTHS)
    text = _FRACTION.sub(lambda found: f"{found[1]} {normalize('NFKC', found[2])}".replace("⁄", "/"), text).strip()
    text = _GROUPED.sub(lambda found: found[0].replace(found[1], ""), text)
    previous = None
    while text != previous:
        previous = text
        text = text.removesuffix("**").rstrip() if text.count("**") == 1 else text
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner and closing not in inner:
                text = inner.strip()
        text = text.rstrip(".。").rstrip() if not text.endswith("..") else text
    return text


def same(stated: str, reference: str) -> bool:
    """Whether an answer equals a reference as text or as a plain number.

    Ignored are case, spacing, thousands separators, a final full stop, a fraction of 0, a unit or currency that only
    one of them has, and what surrounds the letter of a choice, as in `Option (B) Paris`.
    """
    own, wanted = normalise(stated), normalise(reference)
    if own == wanted:
        return True
    if letter := _SET_CHOICE.match(reference):
        wanted = letter[1].casefold()
    if re.fullmatch(r"[a-z]|yes|no|true|false", wanted):
        choice = _CHOICE.match(own)
        another = _ANOTHER.match(own, choice.end()) if choice is not None else None
        return choice is not None and choice[1] == wanted and (another is None or wanted in another.groups())
    if re.fullmatch(r"[a-z]", own) and (offered := _OFFERED.match(reference)):
        return offered[1].casefold() == own
    if "," not in wanted and re.search(r"\d,(?:\d\d|[1-9])", stated) and own.count(",") == 1:
        own = own.replace(",", ".")  # a decimal comma, unless a pair is expected
    amounts = _amount(own), _amount(wanted)
    if any(unit for _, unit in amounts):  # otherwise `5d` may be a product
        amounts = _amount(_BEFORE_UNIT.sub(" ", own)), _amount(_BEFORE_UNIT.sub(" ", wanted))
    (number, unit), (other, other_unit) = amounts
    return number is not None and number == other and (unit == other_unit or not unit or not other_unit)


def contradicts(stated: str, reference: str) -> bool:
    """Whether two answers differ in number base, in certain units, or in the choice."""
    letter, choice = _SET_CHOICE.match(reference), _CHOICE.match(normalise(stated).lstrip("{"))
    another = letter and choice and letter[1].casefold() != choice[1] <= "j"
    amounts = [_amount(normalise(_BEFORE_UNIT.sub(" ", answer))) for answer in (stated, reference)]
    units = [unit for _, unit in amounts if _MEASURED.fullmatch(unit)]
    marks = [[set(mark.findall(as_latex(answer).casefold())) for answer in (stated, reference)] for mark in _APART]
    if {*units} != {"m", "min"}:  # `5m` may be minutes
        marks += [[{unit.partition("^")[0]} for unit in units], [set(_POWER.findall(unit)) for unit in units]]
    pairs = (pair for pair in marks if len(pair) == 2)
    return bool(another) or any(own and wanted and own.isdisjoint(wanted) for own, wanted in pairs)


def normalise(answer: str) -> str:
    """Normalise case, spacing, thousands separators, and a final full stop."""
    if re.fullmatch(r"[A-J](?:(?:, ?|、|,? and )[A-J])+", answer):  # several choices, also written `AC`
        return "".join(re.findall(r"[A-J]", answer)).casefold()
    text = " ".join(answer.split()).casefold().translate(_TYPED)
    text = re.sub(rf" ?(?:{_DOTS}|\.{{3}}(?=.)|(?:(?<=,)|(?<=, ))\.{{3}}) ?", "…", text).rstrip(".").strip()
    text = re.sub(r"(\.\d+)…$", r"\1", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|,?\\[,;:! ])(?=\d{3}\b)", "", text)
    text = re.sub(r"[(\[][^()\[\]]*[)\]]|(?<=\d),(?=\d{3}\b)", lambda found: found[0].removeprefix(","), text)
    text = re.sub(r" ?([-+*/^=<>,(){}\[\]|]) ?", r"\1", text)
    text = re.sub(r"(?<=\d) ?(?:\\(?:text|mathrm)\{)?([ap])\.? ?m\b\.?\}?", r" \1m", text)
    text = re.sub(r"(?<!\\) (?=\\[a-z])", "", text)
    # The choice `B) Paris` equals `(B) Paris` and `Option B: Paris`.
    text = re.sub(r"^(?:option |choice )(?=[a-z](?:[.:]|$))|^(?:option|choice)?\((?=[a-z]\))", "", text)
    text = text[0] if re.fullmatch(r"[a-z]\)", text) else text
    return str(_NUMBERS.index(text)) if text in _NUMBERS else text


def _amount(text: str) -> tuple[Decimal | str | None, str]:
    text = re.sub(r"\^\{?\\circ\}?", "°", text.replace("\\$", "$").replace("\\%", "%"))
    text = re.sub(r"(?:\\[,;: ]){0,3}\\(?:text|mathrm|textbf)\{([^{}]*)\}", r" \1", text).replace("~", " ")
    found = _NUMBER.fullmatch(text.strip())
    if found is None or any(word.strip(".") in _NO_UNITS for word in found[3].split()):
        return None, ""
    unit = (found[1] + found[3].strip()).strip(" .").replace("° ", "°")
    return found[2] if "/" in found[2] else Decimal(found[2]), _SIGNS.get(unit) or _symbol(unit)


def _symbol(unit: str) -> str:
    return "/".join(map(_symbol_of_word, unit.replace(" per ", "/").replace("mph", "mi/h").split("/")))


def _symbol_of_word(word: str) -> str:
    found = _UNIT_WORD.fullmatch(word)
    if found is None or not (found[1] or found[3] in _SYMBOLS):
        return word
    power = found[4] or {"sq": "^2", "cu": "^3"}.get(found[1], "")
    return f"{(found[2] or '')[:1]}{_SYMBOLS.get(found[3], found[3])}{power}"


def is_text(answer: str) -> bool:
    """Whether a reference consists of words, such as a name, whose letters must not be read as factors."""
    words = re.findall(r"[^\W\d_]{3,}", answer)
    return bool(words) and not re.search(r"[\d\\^=<>+*/_|]", answer) and not {*map(str.casefold, words)} & _FUNCTIONS


def formula(reference: str) -> str:
    r"""The only formula of a sentence, `The sum is $\frac{1}{2}$.`, if its words add nothing, or else everything."""
    found = _IN_SENTENCE.fullmatch(reference)
    return reference if found is None else found[1]


def as_latex(answer: str) -> str:
    """Rewrite the signs and numbers of an expression that are not LaTeX as LaTeX."""
    answer = _REPEATING.sub(_fraction, answer.translate(_TEX))
    for pattern, replacement in _TO_LATEX:
        answer = pattern.sub(replacement, answer)
    return answer


def without_lead(latex: str, other: str) -> str:
    """Drop the name or word before an expression's value, unless the other expression has a different name."""
    lead = _LEAD.match(latex)
    if lead is None or ("=" in lead[0] and "=" in other.replace(" ", "").removeprefix(lead[0].replace(" ", ""))):
        return latex
    return latex[lead.end() :]


def in_order(latex: str, other: str) -> str:
    """Turn assignments, `y=2, x=1`, into a point, (1, 2), if the other answer names no variables."""
    pairs = [part.split("=") for part in re.split(r",|;|\\text\{\s*and\s*\}|\band\b", latex)]
    names = {pair[0].strip() for pair in pairs if len(pair) == 2}
    if "=" in other or not 1 < len(names) == len(pairs) or not (names <= set("xyz") or names <= set("abcd")):
        return latex
    return f"({', '.join(value.strip() for _, value in sorted(pairs, key=lambda pair: pair[0].strip()))})"


def keep_variable(latex: str, other: str) -> str:
    """Put an expression's last letter in braces if it is a variable there or in the other expression: `2+3t`.

    math-verify would take it for a unit and drop it.
    """
    own, others = _IN_FONT.sub("", latex), _LETTER.findall(_IN_FONT.sub("", other))
    last = _LAST_LETTER.search(own)
    if last is None or not (
        re.search(r"\S[cdot]\s*$", own)
        or last[1] in _LETTER.findall(own) + others
        or re.search(r"[\w})]\s*[-+]\s*[^-+=\s]*[a-z]\s*$", own)
    ):
        return latex
    return _LAST_LETTER.sub(r"{\1}", latex)


def _fraction(repeating: re.Match[str]) -> str:
    first, digits = f"{repeating[1]}{repeating[2]}", repeating[3] or repeating[4] or repeating[5]
    nines = "9" * len(digits) + "0" * len(repeating[2])
    return f"\\frac{{{int(first + digits) - int(first or 0)}}}{{{nines}}}"
