"""Stage 1 of the answer checker: characters -> tokens.

    tokens (this file)  ->  latex (grammar, tree)  ->  values (numbers)  ->  equality (policy)  ->  checker

`tokenize` takes an answer as people and models write it (LaTeX, plain text, unicode, code-like `2*x**3`) and
gives a flat list of `Token`s in one spelling: `\\dfrac`, `\\tfrac` and `\\cfrac` all become `frac`; `\\leqslant`,
`≤` and `<=` all become `<=`; layout (spacing, sizes, colours, fonts, `\\left`, dollar signs) is gone.
Everything that means something is kept: what has no meaning here becomes a token of kind "bad", on which the
parser fails. Nothing is dropped in silence and nothing is ever executed.

Token kinds
    num    a numeral; `value` is its exact rational value, `text` its digits as written without separators
    name   one letter or a symbol command (`x`, `\\alpha`, `\\hbar`): a mathematical symbol
    word   a run of two or more bare letters (`ab`, `yes`, `cm`): the parser decides what it is
    text   a word of a `\\text{...}`-like command, without its case if it is longer than one letter
    cmd    a known command or function (`frac`, `sqrt`, `sin`, `pi`, `begin`)
    op     a sign: + - * / ^ _ ( ) [ ] { } | , ; : = < > <= >= != ~= -> in cup cap setminus % deg ' ! pm mp ...
    bad    anything unknown
    end    the end
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_CHARS = 4_000       # longer answers are compared as strings only
MAX_EXPONENT = 5_000    # of e-notation: 1e5000 is built, 1e5001 is not


class Token(NamedTuple):
    kind: str
    text: str
    value: Fraction | None = None   # of numerals
    digits: int = 0                 # significant digits of a decimal literal, 0 for integers


# ---------------------------------------------------------------------------------------------- unicode -> LaTeX

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "•": r"\cdot ", "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "±": r"\pm ", "∓": r"\mp ", "√": r"\sqrt ", "∛": r"\sqrt[3]",
    "∜": r"\sqrt[4]", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≦": r"\le ", "≧": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "≃": r"\approx ", "∼": r"\approx ", "≡": r"\equiv ", "→": r"\to ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∉": r"\notin ", "∅": r"\emptyset ", "∖": r"\setminus ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "°": r"\degree ", "º": r"\degree ",
    "˚": r"\degree ", "′": "'", "’": "'", "‘": "'", "″": "''", "“": '"', "”": '"', "…": r"\ldots ", "⋯": r"\ldots ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∠": r"\angle ", "△": r"\triangle ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "∣": "|", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "ℏ": r"\hbar ",
    "∂": r"\partial ", "∇": r"\nabla ", "¢": r"\text{ cents}", "€": r"\text{€}", "£": r"\text{£}", "¥": r"\text{¥}", "，": ",", "；": ";", "：": ":",
    "。": ".", "、": ",", "％": r"\%", "℃": r"\degree C", "℉": r"\degree F", "⊤": r"\top ", "\u2003": " ", "\u00a0": r"\,",
    "\u2009": r"\,", "\u202f": r"\,", "\u2007": r"\,", "\u200a": r"\,", "\u2005": r"\,", "\u2006": r"\,", "\u2008": r"\,",
    "ϵ": r"\epsilon ", "ϕ": r"\phi ", "∆": r"\Delta ", "Ω": r"\Omega ", "µ": r"\mu ",
}
_GREEK_NAMES = ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau "
                "upsilon phi chi psi omega").split()
for _name in _GREEK_NAMES:
    for _case, _latex in (("SMALL", _name), ("CAPITAL", _name.capitalize())):
        _UNICODE[unicodedata.lookup(f"GREEK {_case} LETTER {'LAMDA' if _name == 'lambda' else _name.upper()}")] = f"\\{_latex} "
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ", "0123456789+-()nix"))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₐₑᵢₙₖₘₓ", "0123456789+-()aeinkmx"))
_SUPER_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SUB_RUN = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")


def _plain(char: str) -> str:
    """One non-ASCII character in ASCII or LaTeX; invisible ones (zero-width, bidirectional) vanish."""
    if char in _UNICODE:
        return _UNICODE[char]
    folded = unicodedata.normalize("NFKC", char)
    if "⁄" in folded:                                            # ½: one half
        top, bottom = folded.split("⁄")
        return rf"\frac{{{top}}}{{{bottom or 1}}}"
    if folded != char and len(folded) < 8:
        return "".join(c if c.isascii() else _UNICODE.get(c, c) for c in folded)
    if unicodedata.category(char) == "Nd":
        return str(unicodedata.digit(char))
    return "" if unicodedata.category(char) == "Cf" else char


def to_ascii(text: str) -> str:
    """Unicode spellings of mathematics as LaTeX: `x²≥½` -> `x^{2}\\ge \\frac{1}{2}`."""
    if text.isascii():
        return text
    text = _SUPER_RUN.sub(lambda run: "^{" + "".join(map(_SUPERSCRIPTS.get, run[0])) + "}", text)
    text = _SUB_RUN.sub(lambda run: "_{" + "".join(map(_SUBSCRIPTS.get, run[0])) + "}", text)
    return "".join(char if char.isascii() else _plain(char) for char in text)


# ------------------------------------------------------------------------------------------------ command tables

def _table(**spellings: str) -> dict[str, str]:
    return {spelling: canonical for canonical, line in spellings.items() for spelling in line.split()}


_OPS = {   # commands that are signs
    **dict.fromkeys("le leq leqslant leqq".split(), "<="), **dict.fromkeys("ge geq geqslant geqq".split(), ">="),
    **dict.fromkeys("ne neq".split(), "!="), "lt": "<", "gt": ">", "in": "in", "notin": "notin",
    **dict.fromkeys("approx simeq sim cong thickapprox doteq".split(), "~="), "equiv": "==",
    **dict.fromkeys("to rightarrow mapsto longrightarrow".split(), "->"),
    **dict.fromkeys("implies Rightarrow Longrightarrow iff Leftrightarrow".split(), "=>"),
    "cup": "cup", "cap": "cap", **dict.fromkeys("setminus backslash smallsetminus".split(), "setminus"),
    **dict.fromkeys("times cdot ast".split(), "*"), "div": "/", "pm": "pm", "mp": "mp",
    "{": r"\{", "}": r"\}", "lbrace": r"\{", "rbrace": r"\}", "langle": "(", "rangle": ")", "lbrack": "[", "rbrack": "]",
    "lparen": "(", "rparen": ")",
    **dict.fromkeys("lvert rvert vert mid | Vert lVert rVert".split(), "|"),
    **dict.fromkeys("lfloor rfloor lceil rceil".split()), "%": "%", "degree": "deg", "prime": "'", "colon": ":",
    **dict.fromkeys("ldots dots cdots dotsc dotsb".split(), "..."), "&": "&", "\\": "\\\\", "land": "and", "wedge": "and",
    "lor": "or", "vee": "or", "_": "_", "slash": "/", "top": "top", "intercal": "top",
}
_OPS = {command: sign or command for command, sign in _OPS.items()}
_SYMBOLS = {*_GREEK_NAMES, *(n.capitalize() for n in _GREEK_NAMES), "hbar", "ell", "odot", "mho", "partial", "nabla",
            "star", "Re", "Im", "imath", "jmath", "oplus", "otimes", "perp", "parallel", "triangle", "square"} - {"pi"}
_VARIANTS = _table(epsilon="varepsilon", phi="varphi", theta="vartheta", rho="varrho", sigma="varsigma", pi="varpi")
FUNCTIONS = set("sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch arcsinh arccosh "
                "arctanh ln log lg exp sqrt min max gcd lcm det factorial binom floor ceil abs sgn arg".split())
_COMMANDS = FUNCTIONS | {"pi", "infty", "emptyset", "frac", "binom", "overline", "hat", "dot", "ddot", "tilde", "bar",
                         "sum", "prod", "int", "lim", "angle", "choose", "pmod", "bmod", "mod", "boxed", "over", "cbrt"}
_ALIASES = _table(frac="dfrac tfrac cfrac", binom="dbinom tbinom", emptyset="varnothing", overline="overbar", hat="widehat",
                  tilde="widetilde", csc="cosec", cot="ctg", tan="tg", arctan="arctg atan", arcsin="asin", arccos="acos",
                  arcsinh="asinh arsinh", arccosh="acosh arcosh", arctanh="atanh artanh", infty="infinity inf oo",
                  int="iint oint", sgn="sign", ceil="ceiling", binom_="", lim="limit", angle="measuredangle")
# Plain-text names that are read without a backslash (`2*pi*r`, `sqrt(5)`, `np.arcsin(x)`).
_BARE = {name: name for name in FUNCTIONS | {"pi"}} | {s: c for s, c in _ALIASES.items() if c in FUNCTIONS or c == "infty"}
_BARE |= {name: name for name in ("theta", "alpha", "beta", "gamma", "lambda", "omega", "sigma", "delta")}
_BARE_PREFIX = re.compile("|".join(sorted((n for n in _BARE if n not in
                          {"oo", "inf", "min", "max", "arg", "sign", "det", "abs", "lg", "tg"}), key=len, reverse=True)))
_LAYOUT = set("displaystyle textstyle scriptstyle left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl "
              "Biggr limits nolimits mathbf boldsymbol bm mathit mathsf mathcal mathscr mathfrak mathnormal vec overrightarrow "
              "underline ensuremath mathop pmb Large large small bf it rm sf bold boldmath phantomsection "
              "mathord mathrel mathbin mathopen mathclose therefore because framebox nonumber notag hfill hline centering boxed fbox".split())
_SPACING = set("( ) [ ] , ; : ! > quad qquad enspace thinspace medspace thickspace negthinspace nobreakspace ~".split()) | {" ", "\n", "\t"}
_DROP_WITH_ARGUMENT = set("color tag label phantom hphantom vphantom hspace vspace mspace hskip".split())
_DROP_FIRST_ARGUMENT = {"textcolor", "colorbox", "fcolorbox"}
_TEXT = set("text textbf textit textrm textsf texttt textnormal textup mbox hbox emph operatorname mathrm mathtt textsc".split())
WORD_OPS = {"and": "and", "or": "or"}

# ------------------------------------------------------------------------------------------------------- the lexer

_SEPARATOR = r"(?:,|\{,\}|,\\!\s*|\\[,;:]|\\?[ ]|~)"
_DIGITS = rf"(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)(?!\s*/)|\d+)"
_DIGITS_LIST = r"(?:\d{1,3}(?:(?:\{,\}|,\\!\s*|\\,)\d{3})+(?!\d)|\d+)"


def _numeral(digits: str) -> re.Pattern[str]:
    """Digits, then a repeating decimal (`.1\overline{6}`, `.1666...`, `.(3)`) or decimals or none, then an exponent."""
    return re.compile(rf"""(?P<whole>{digits})?
        (?: \.(?P<head>\d{{0,40}}) (?: \\(?:overline|bar|dot)\s*(?:\{{(?P<over>\d+)\}}|(?P<over1>\d)) | \((?P<over2>\d+)\)(?=\s*$) )
          | \.(?P<head2>\d{{0,6}}?) (?P<block>\d{{1,6}}?)(?P=block)+ \s*(?:\\[lc]?dots|\.\.\.+)
          | (?P<decimals>\.\d*) )?
        (?:[eE](?P<exponent>[+-]?\d+)(?![\d.]))?""", re.VERBOSE)


_NUMERAL, _NUMERAL_LIST = _numeral(_DIGITS), _numeral(_DIGITS_LIST)
AMBIGUOUS_COMMA = re.compile(r"(?<!\d)\d{1,3}(?:,\d{3})+(?!\d)")   # 1,234: one number or two
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+\*?|.)", re.DOTALL)
_SIGNS = re.compile(r"\*\*|<=|>=|!=|==|->|=>|\.\.\.+|[-+*/^_()\[\]{}|,;:.=<>!'%&]")
_LETTERS = re.compile(r"[A-Za-z]+")
_GROUP = re.compile(r"\s*(\[[^\]]*\])?\s*\{([^{}]*)\}")


def _as_num(match: re.Match[str]) -> Token:
    whole = re.sub(r"\D", "", match["whole"] or "")
    repeat = match["over"] or match["over1"] or match["over2"] or match["block"]
    decimals, exponent = match["decimals"], match["exponent"]
    if repeat is not None:
        head = match["head"] or match["head2"] or ""
        scale = 10 ** len(head)
        value = Fraction(int((whole or "0") + head), scale) + Fraction(int(repeat), scale * (10 ** len(repeat) - 1))
        return Token("num", f"{whole}.{head}({repeat})", value)
    if exponent and abs(int(exponent[-9:])) + 10 ** 4 * (len(exponent) > 9) > MAX_EXPONENT:
        return Token("bad", match[0])
    fraction = (decimals or ".")[1:]
    value = Fraction(int(whole + fraction or "0"), 10 ** len(fraction))
    if exponent:
        value *= Fraction(10) ** int(exponent)
    digits = len((whole + fraction).lstrip("0")) if fraction or exponent else 0
    text = whole + (f".{fraction}" if fraction else "") + (f"e{int(exponent)}" if exponent else "")
    return Token("num", text, value, digits)


def _braced(text: str, at: int) -> int:
    """The index after the `}` that closes the `{` at `at`; -1 if none does."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return -1


def _text_tokens(content: str, command: str, lists: bool, depth: int) -> list[Token]:
    """The tokens of the argument of `\\text`: words are words, all else is read as usual."""
    roman = command in ("mathrm", "operatorname")
    out: list[Token] = []
    for token in _scan(content.replace("~", " "), lists, depth + 1):
        if token.kind == "word":
            out.append(Token("text", token.text if token.text in ("AM", "PM") else token.text.lower()))
        elif token.kind == "name" and token.text.isalpha() and token.text not in "eid":
            out.append(Token("roman", token.text))               # \mathrm{m}: metre or m, the parser decides
        elif token.kind == "cmd" and token.text in ("min", "max", "sec", "deg") and not roman:
            out.append(Token("text", token.text))
        else:
            out.append(token)
    return out


def _scan(text: str, lists: bool, depth: int = 0) -> list[Token]:
    numeral = _NUMERAL_LIST if lists else _NUMERAL
    out: list[Token] = []
    at, end = 0, len(text)
    if depth > 20:
        return [Token("bad", "nesting")]
    while at < end:
        char = text[at]
        if char.isspace() or char in "~$`\"\x0b":
            at += 1
        elif char.isdigit() or char == "." and text[at + 1:at + 2].isdigit():
            match = numeral.match(text, at)
            out.append(_as_num(match))
            at = match.end()
        elif char == "\\":
            match = _COMMAND.match(text, at)
            if match is None:
                return out + [Token("bad", "\\")]
            name, at = match[0][1:].rstrip("*"), match.end()
            if name in _TEXT:
                opened = re.compile(r"\s*\{").match(text, at)
                closed = _braced(text, opened.end() - 1) if opened else -1
                if closed < 0:
                    out.append(Token("bad", name))
                    continue
                content = text[opened.end():closed - 1]
                known = name == "operatorname" and (_BARE.get(content.strip()) or content.strip())
                out += ([Token("cmd", known)] if known in FUNCTIONS else _text_tokens(content, name, lists, depth))
                at = closed
            elif name in ("begin", "end"):
                group = _GROUP.match(text, at)
                out.append(Token("cmd", f"{name} {group[2].strip('*')}") if group else Token("bad", name))
                at = group.end() if group else at
                if group and name == "begin" and group[2].startswith("array"):   # \begin{array}{cc|c}
                    columns = re.compile(r"\s*\{[lcr|@{}\s]*\}").match(text, at)
                    at = columns.end() if columns else at
            elif name in _DROP_WITH_ARGUMENT or name in _DROP_FIRST_ARGUMENT:
                opened = re.compile(r"\s*\{").match(text, at)
                at = _braced(text, opened.end() - 1) if opened else at
                if at < 0:
                    return out + [Token("bad", name)]
            elif name in ("left", "right") and text[at:at + 1] == ".":
                at += 1
            elif name == "mathbb":
                group = re.compile(r"\s*\{?\s*([A-Z])\s*\}?").match(text, at)
                out.append(Token("cmd", "reals") if group and group[1] == "R" else
                           Token("name", f"\\mathbb{group[1]}") if group else Token("bad", name))
                at = group.end() if group else at
            elif name == "\\":
                skip = re.compile(r"\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]").match(text, at)   # \\[4pt]
                at = skip.end() if skip else at
                out.append(Token("op", "\\\\"))
            elif name == "not":
                negated = re.compile(r"\s*(=|\\in\b)").match(text, at)
                out.append(Token("op", {"=": "!="}.get(negated[1], "notin")) if negated else Token("bad", name))
                at = negated.end() if negated else at
            elif name == "$":
                out.append(Token("text", "$"))
            elif name in ("R", "reals", "Reals", "real"):
                out.append(Token("cmd", "reals"))
            elif name not in _LAYOUT and name not in _SPACING:
                out.append(_command(name))
        elif char.isalpha() and char.isascii():
            match = _LETTERS.match(text, at)
            run, at = match[0], match.end()
            if run == "np" and text[at:at + 1] == ".":            # np.arcsin
                at += 1
            elif len(run) == 1:
                out.append(Token("name", run))
            elif run in ("and", "or"):
                out.append(Token("op", run))
            elif len(run) > 3 and text[at - len(run) - 1:at - len(run)] == " " and _is_word_after_number(run, out):
                out.append(Token("text", run))
            elif run in _BARE:
                out.append(_command(_BARE[run]))
            else:
                out.append(Token("word", run))
        elif match := _SIGNS.match(text, at):
            sign = {"**": "^", "!=": "!=", "==": "="}.get(match[0], match[0])
            out.append(Token("op", "..." if sign.startswith("...") else sign))
            at = match.end()
        else:
            out.append(Token("text", char) if char in "€£¥" else Token("bad", char))
            at += 1
    return out


def _is_word_after_number(run: str, before: list[Token]) -> bool:
    """Whether a run of bare letters after a number and a space is a word (`12 students`), not a product."""
    return before[-1:] != [] and before[-1].kind == "num" and run.islower() and run not in _BARE and any(c in "aeiou" for c in run)


def _command(name: str) -> Token:
    name = _VARIANTS.get(name, name)
    name = _ALIASES.get(name, name)
    if name == ".":
        return Token("op", ".")
    if name in _OPS:
        return Token("op", _OPS[name])
    if name == "circ":
        return Token("op", "circ")
    if name in _SYMBOLS:
        return Token("name", "\\" + name)
    return Token("cmd", name) if name in _COMMANDS else Token("bad", "\\" + name)


_MERIDIEM = re.compile(r"\b([ap])\.\s?m\b\.?", re.IGNORECASE)
_QUOTED = re.compile(r"(\*\*|'|\*|__|_)([^*'_]+)\1")
_PERCENT = {"percent", "pct", "percentage", "percents"}
_ANSWER_PREFIX = re.compile(r"^\s*(?:\\text(?:bf)?\s*\{)?\s*(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is\b|:|=)+\s*:?\s*", re.IGNORECASE)


def tokenize(text: str, lists: bool = False) -> list[Token]:
    """The tokens of an answer, ended by a token of kind "end".

    Args:
        text: the answer, at most `MAX_CHARS` characters.
        lists: read an ambiguous comma between digits (`1,234`) as a separator, not as a thousands mark.
    """
    text = to_ascii(text).strip()
    if (prefix := _ANSWER_PREFIX.match(text)) and prefix.end() < len(text):
        text = text[prefix.end():] if "{" not in prefix[0] else prefix[0][:prefix[0].index("{") + 1] + text[prefix.end():]
    text = _MERIDIEM.sub(r"\1m", text)
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[2]
    tokens: list[Token] = []
    for token in _scan(text, lists):
        if token.text in _PERCENT and token.kind in ("text", "word"):
            token = Token("op", "%")
        elif token.kind == "text" and token.text in ("and", "or"):
            token = Token("op", token.text)
        elif token.kind in ("text", "word") and token.text in ("degree", "degrees", "deg"):
            token = Token("op", "deg")
        elif token.text == "circ":                               # ^\circ and ^{\circ}
            if tokens and tokens[-1].text == "^":
                tokens.pop()
                token = Token("op", "deg")
            elif len(tokens) > 1 and tokens[-1].text == "{" and tokens[-2].text == "^":
                del tokens[-2:]
                token = Token("op", "deg}")                      # swallows the "}" that follows
            else:
                token = Token("bad", "circ")
        elif token.text == "}" and tokens and tokens[-1].text == "deg}":
            tokens[-1] = Token("op", "deg")
            continue
        tokens.append(token)
    while tokens and tokens[-1].text in (".", ",", ";"):
        tokens.pop()
    return tokens + [Token("end", "")]


def split_word(word: str) -> list[Token]:
    """A run of bare letters as the product that it then is: `xsinx` -> x, sin, x."""
    out: list[Token] = []
    at = 0
    while at < len(word):
        if match := _BARE_PREFIX.match(word, at):
            out.append(_command(_BARE[match[0]]))
            at = match.end()
        else:
            out.append(Token("name", word[at]))
            at += 1
    return out
