r"""Characters -> tokens.

`tokenize` takes an answer as people and models write it (LaTeX, plain text, unicode, code-like `2*x**3`) and
gives a flat list of `Token`s in one spelling: `\dfrac`, `\tfrac` and `\cfrac` all become `frac`; `\leqslant`,
`≤` and `<=` all become `<=`; layout (spacing, sizes, colours, fonts, `\left`, dollar signs) is gone.
Everything that means something is kept: what has no meaning here becomes a token of kind "bad", on which the
parser fails. Nothing is dropped in silence and nothing is ever executed.

Token kinds
    based  a numeral with letters in a stated base, `3A7_16`
    num    a numeral; `value` is its exact rational value, `text` its digits as written without separators
    name   one letter or a symbol command (`x`, `\alpha`, `\hbar`): a mathematical symbol
    word   a run of two or more bare letters (`ab`, `yes`, `cm`): the parser decides what it is
    text   a word of a `\text{...}`-like command, in lower case if it is longer than one letter
    roman  one letter of a `\text{...}`-like command: a unit, a symbol or a choice
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

from nano_exgrpo.checker.functions import CALLED, FUNCTIONS, SPELLINGS

MAX_CHARS = 4_000  # longer answers are compared as strings only
MAX_EXPONENT = 5_000  # of e-notation: 1e5000 is built, 1e5001 is not


class Token(NamedTuple):
    kind: str
    text: str
    value: Fraction | None = None  # of numerals
    digits: int = 0  # significant digits of a decimal literal, 0 for integers
    written: str = ""  # of a "text" token: the word with its case


# ---------------------------------------------------------------------------------------------- unicode -> LaTeX

_COMMAND_SIGNS = """× times · cdot ⋅ cdot ∙ cdot • cdot ± pm ∓ mp √ sqrt ∞ infty ≤ le ≥ ge ⩽ le ⩾ ge ≦ le ≧ ge ≠ ne
≈ approx ≃ approx ∼ approx ≡ equiv → to ∪ cup ∩ cap ∈ in ∉ notin ∅ emptyset ∖ setminus ° degree º degree ˚ degree
… ldots ⋯ ldots ⌊ lfloor ⌋ rfloor ⌈ lceil ⌉ rceil ∠ angle △ triangle ⟨ langle ⟩ rangle ∑ sum ∏ prod ∫ int ℏ hbar
∀ forall ∂ partial ∇ nabla ⊤ top ϵ epsilon ϕ phi ∆ Delta Ω Omega µ mu""".split()
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau "
    "upsilon phi chi psi omega"
).split()
_UNICODE = dict(zip("−–—‐‑‒∗÷∕⁄∣，、；：。“”\u2003", '------*///|,,;:."" ')) | dict.fromkeys("′’‘", "'")
_UNICODE |= {sign: f"\\{name} " for sign, name in zip(_COMMAND_SIGNS[::2], _COMMAND_SIGNS[1::2])}
_UNICODE |= dict.fromkeys("\u00a0\u2009\u202f\u2007\u200a\u2005\u2006\u2008", r"\,")
_UNICODE |= {sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC")}
_UNICODE |= {"∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "″": "''", "％": r"\%", "℃": r"\degree C", "℉": r"\degree F"}
_UNICODE |= {"¢": r"\text{ cents}"} | {sign: rf"\text{{{sign}}}" for sign in "€£¥"}
for _name in _GREEK_NAMES:
    for _case, _latex in (("SMALL", _name), ("CAPITAL", _name.capitalize())):
        _official = "LAMDA" if _name == "lambda" else _name.upper()
        _UNICODE[unicodedata.lookup(f"GREEK {_case} LETTER {_official}")] = f"\\{_latex} "
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ", "0123456789+-()nix"))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₐₑᵢₙₖₘₓ", "0123456789+-()aeinkmx"))
_SUPER_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SUB_RUN = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")


def _plain(char: str) -> str:
    """One non-ASCII character in ASCII or LaTeX; invisible ones (zero-width, bidirectional) vanish."""
    if char in _UNICODE:
        return _UNICODE[char]
    folded = unicodedata.normalize("NFKC", char)
    if "⁄" in folded:  # ½: one half
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


# ------------------------------------------------------------------------------------------------- what is written


_SIGN_NAMES = {  # sign -> the commands for it
    "<=": "le leq leqslant leqq",
    ">=": "ge geq geqslant geqq",
    "!=": "ne neq",
    "~=": "approx simeq sim cong thickapprox doteq",
    "->": "to rightarrow mapsto longrightarrow",
    "=>": "implies Rightarrow Longrightarrow iff Leftrightarrow",
    "setminus": "setminus backslash smallsetminus",
    "*": "times cdot ast *",
    "/": "div slash",
    r"\{": "{ lbrace",
    r"\}": "} rbrace",
    "(": "langle lparen",
    ")": "rangle rparen",
    "|": "lvert rvert vert mid",
    "||": "| Vert lVert rVert",
    "...": "ldots dots cdots dotsc dotsb",
    "and": "land wedge",
    "or": "lor vee",
    "top": "top intercal",
}
_OPS = {name: sign for sign, names in _SIGN_NAMES.items() for name in names.split()}
_OPS |= dict(lt="<", gt=">", equiv="==", lbrack="[", rbrack="]", degree="deg", prime="'", colon=":")
_OPS |= {name: name for name in "in notin cup cap pm mp lfloor rfloor lceil rceil % & _ .".split()}
_SYMBOLS = {*_GREEK_NAMES, *(name.capitalize() for name in _GREEK_NAMES)} - {"pi"} | set(
    "hbar ell odot mho partial nabla star Re Im imath jmath oplus otimes perp parallel triangle square".split()
)
_VARIANTS = {"var" + name: name for name in "epsilon phi theta rho sigma".split()}
_UNIT_SIGNS = "€£¥Å"
_QUANTITIES = set("Var Cov Corr Pr Area area Perimeter perimeter Volume volume rank tr dim deg ord".split())
# Plain-text names that are read without a backslash (`2*pi*r`, `sqrt(5)`, `np.arcsin(x)`).
_BARE = {name: name for name in CALLED | {"pi", "inf"} | set("theta alpha beta gamma lambda omega sigma delta".split())}
_BARE |= {spelling: name for spelling, name in SPELLINGS.items() if name in CALLED or name == "inf"}
# ... and those of them that are also found inside a run of letters (`xsinx`, `2pir`).
_NEVER_INSIDE = set("oo inf min max cis arg sign det abs Abs lg tg".split())
_INSIDE = re.compile("|".join(sorted(set(_BARE) - _NEVER_INSIDE, key=len, reverse=True)))
_LAYOUT = set(
    "displaystyle textstyle scriptstyle left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl "
    "biggr Biggl Biggr limits nolimits mathbf boldsymbol bm mathit mathsf mathcal mathscr mathfrak "
    "mathnormal underline ensuremath mathop pmb Large large small bf it rm sf bold "
    "boldmath mathord mathrel mathbin mathopen mathclose therefore because nonumber notag hfill hline "
    "centering boxed fbox framebox quad qquad enspace thinspace medspace thickspace negthinspace "
    "nobreakspace checkmark".split()
) | set("()[],;:!> \n\t~")
_DROP_WITH_ARGUMENT = set(
    "color textcolor colorbox fcolorbox tag label phantom hphantom vphantom hspace vspace "
    "mspace hskip leftroot uproot".split()
)
_TEXT = set(
    "text textbf textit textrm textsf texttt textnormal textup mbox hbox emph operatorname mathrm mathtt textsc".split()
)

# ------------------------------------------------------------------------------------------------------- the lexer

_THIN = r"\{,\}|,\\!\s*|\\,"  # thousands marks that cannot separate two numbers
_DIGITS = rf"(?:\d{{1,3}}(?:(?:{_THIN}|,|\\[;:]|\\?[ ]|~)\d{{3}})+(?!\d)(?!\s*/)|\d+)"
_DIGITS_LIST = (
    rf"(?:\d{{1,3}}(?:(?:{_THIN})\d{{3}})+(?!\d)"
    r"|\d{1,3}(?=(?:,\d{3})*,0\d\d(?!\d))(?:,\d{3})+(?!\d)|\d+)"
)  # 1,050 is one number: no list says 050
AMBIGUOUS_COMMA = re.compile(r"(?<!\d)\d{1,3}(?:,\d{3})+(?!\d)")  # 1,234: one number or two


def _numeral(digits: str) -> re.Pattern[str]:
    """Digits, a repeating decimal (`.1\\overline{6}`, `.1666...`, `.(3)`) or decimals or none, maybe an exponent."""
    return re.compile(
        rf"""(?P<whole>{digits})?
        (?: \.(?P<head>\d{{0,40}}) (?: \\(?:overline|bar|dot)\s*(?:\{{(?P<over>\d+)\}}|(?P<over1>\d))
                                     | \((?P<over2>\d+)\)(?=\s*$) )
          | \.(?P<head2>\d{{0,6}}?) (?P<block>\d{{1,6}}?)(?P=block)+ \s*(?:\\[lc]?dots|\.\.\.+)
          | (?P<decimals>\.\d*) )?
        (?:[eE](?P<exponent>[+-]?\d{{1,9}})(?!\d|\.\d))?""",
        re.VERBOSE,
    )


_NUMERAL, _NUMERAL_LIST = _numeral(_DIGITS), _numeral(_DIGITS_LIST)
_COMMAND = re.compile(r"\\([a-zA-Z]+|.|$)\*?", re.DOTALL)
_SIGNS = re.compile(r"\*\*|<=|>=|!=|==|->|=>|\.\.\.+|[-+*/^_()\[\]{}|,;:.=<>!'%&]")
_LETTERS = re.compile(r"[A-Za-z]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_OPEN = re.compile(r"\s*(?:\[[^\]]*\]\s*)?\{")
_SKIP = re.compile(r"[\s~$`\"]+")
_BASED = re.compile(r"((?=[A-F]*\d)(?=\d*[A-F])[\dA-F]+)\s*_\s*(?:\{\s*(1[1-6])\s*\}|(1[1-6])(?!\d))")
_BARE_LETTER = re.compile(r"\s+([A-Za-z])(?![A-Za-z])")
_PHRASE = re.compile(r"(?:of|\w{3}) [a-z]{3}")  # red marbles, of the cake
_BLACKBOARD = re.compile(r"\s*\{?\s*([A-Z])\s*\}?")
_NEGATED = re.compile(r"\s*(=|\\in\b)")
_ROW_SPACE = re.compile(r"\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]")
_COLUMNS = re.compile(r"\s*\{[lcr|@{}\s]*\}")
MAX_TEXT_DEPTH = 10


class _Lexer:
    """One pass over a text from left to right; each method reads one kind of thing at `at` and steps over it."""

    def __init__(self, text: str, lists: bool, depth: int = 0):
        self.text, self.lists, self.depth = text, lists, depth
        self.numeral = _NUMERAL_LIST if lists else _NUMERAL
        self.at = 0
        self.counting = False  # inside the words of a counted noun
        self.out: list[Token] = []

    def run(self) -> list[Token]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if match := _SKIP.match(self.text, self.at):
                self.at = match.end()
            elif match := _BASED.match(self.text, self.at):
                self.at = match.end()
                self.add("based", f"{match[1]}_{match[2] or match[3]}")
            elif char.isdigit() or char == "." and self.text[self.at + 1 : self.at + 2].isdigit():
                self.read_number()
            elif char == "\\":
                self.read_command()
            elif match := _LETTERS.match(self.text, self.at):
                self.read_letters(match[0])
            elif match := _SIGNS.match(self.text, self.at):
                sign = "..." if match[0].startswith("...") else match[0]
                self.at = match.end()
                if sign == "!=" and re.match(r"[\d)]", self.text[max(0, match.start() - 1) :]):
                    sign, self.at = "!", match.start() + 1  # 6!=720 is a factorial, x != 5 is not
                self.add("op", {"**": "^", "==": "="}.get(sign, sign))
            else:
                self.at += 1
                self.add("text" if char in _UNIT_SIGNS else "bad", char)
        return self.out

    def add(self, kind: str, text: str) -> None:
        self.out.append(Token(kind, text))

    def step(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Step over a pattern, if it is here."""
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def argument(self) -> str | None:
        """Step over `{...}` and return what is inside; None, at the end of the text, if it never closes."""
        opened = self.step(_OPEN)
        depth = 1
        for brace in _BRACE.finditer(self.text, self.at) if opened else ():
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                start, self.at = self.at, brace.end()
                return self.text[start : brace.start()]
        self.at = len(self.text)
        return None

    def read_number(self) -> None:
        match = self.step(self.numeral)
        whole, decimals = re.sub(r"\D", "", match["whole"] or ""), (match["decimals"] or ".")[1:]
        exponent = int(match["exponent"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return self.add("bad", match[0])
        scale = Fraction(10) ** exponent
        repeat = match["over"] or match["over1"] or match["over2"] or match["block"]
        if repeat is not None:
            head = match["head"] or match["head2"] or ""
            value = int(whole + head or "0") + Fraction(int(repeat), 10 ** len(repeat) - 1)
            self.out.append(Token("num", f"{whole}.{head}({repeat})e{exponent}", value / 10 ** len(head) * scale))
            return
        value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals)) * scale
        text = whole + (f".{decimals}" if decimals else "") + (f"e{exponent}" if match["exponent"] else "")
        self.out.append(Token("num", text, value, 0 if text == whole else len((whole + decimals).lstrip("0"))))

    def read_letters(self, run: str) -> None:
        before = self.out[-1].kind if self.out and self.text[self.at - 1] == " " else ""
        starts_noun = (
            len(run) > 2 and run.istitle() or run.islower() and (len(run) > 3 or _PHRASE.match(self.text, self.at))
        )
        self.counting = before == "text" if self.counting else before == "num" and has_vowel(run) and bool(starts_noun)
        self.at += len(run)
        if len(run) == 1:
            self.add("name", run)
        elif run in ("and", "or"):
            self.add("op", run)
        elif run in _BARE:
            self.out.append(_command(_BARE[run]))
        elif run in _QUANTITIES and self.text[self.at : self.at + 1] in ("(", "["):
            self.out.append(Token("text", run.lower(), written=run))
        elif run == "np" and self.text[self.at : self.at + 1] == ".":
            self.at += 1
        elif self.counting:  # "12 students", "6 cups of flour": words, not products
            self.out.append(Token("text", run.lower(), written=run))
        else:
            self.add("word", run)

    def read_command(self) -> None:
        name = self.step(_COMMAND)[1]  # "" for a backslash at the very end
        if name in _TEXT:
            self.read_text(name)
        elif name in ("begin", "end"):
            environment = (self.argument() or "?").rstrip("*")
            self.add("cmd", f"{name} {environment}")
            if environment == "array" and name == "begin":
                self.step(_COLUMNS)
        elif name in _DROP_WITH_ARGUMENT:
            if self.argument() is None:
                self.add("bad", name)
        elif name in ("left", "right") and self.text[self.at : self.at + 1] == ".":
            self.at += 1
        elif name == "mathbb":
            letter = self.step(_BLACKBOARD)
            symbol = Token("name", f"\\mathbb{letter[1]}") if letter else Token("bad", name)
            self.out.append(_command("reals") if letter and letter[1] == "R" else symbol)
        elif name in ("\\", "cr"):
            self.step(_ROW_SPACE)
            self.add("op", "\\\\")
        elif name == "not":
            negated = self.step(_NEGATED)
            self.add("op" if negated else "bad", ("!=" if negated[1] == "=" else "notin") if negated else name)
        elif name == "AA" or name == "mathring" and (self.argument() or "").strip("{} ").endswith("A"):
            self.add("text", "Å")
        elif name in ("$", "forall", "dim", "rank", "Pr"):
            self.add("text", {"forall": "for"}.get(name, name.lower()))
        elif name not in _LAYOUT:
            self.out.append(_command(name))

    def read_text(self, command: str) -> None:
        """The argument of `\\text`: words are words, numbers and signs what they are, single letters `roman`."""
        bare = self.step(_BARE_LETTER)  # \mathrm B
        content = bare[1] if bare else self.argument()
        if content is None or self.depth == MAX_TEXT_DEPTH:
            return self.add("bad", command)
        if (command == "operatorname" or content.strip() == "cis") and _BARE.get(content.strip()) in CALLED:
            return self.out.append(_command(_BARE[content.strip()]))
        for token in _Lexer(content.replace("~", " "), self.lists, self.depth + 1).run():
            if token.kind == "word" or token.kind == "cmd" and token.text in ("min", "max", "sec", "det", "sgn"):
                token = Token("text", token.text.lower(), written=token.text)
            elif token.kind == "name" and token.text.isalpha() and token.text not in "eid":
                token = Token("roman", token.text)  # \mathrm{m}: metre or m, the parser decides
            self.out.append(token)


def _command(name: str) -> Token:
    """The token of a command without its backslash."""
    name = SPELLINGS.get(name) or _VARIANTS.get(name, name)
    if name in _OPS:
        return Token("op", _OPS[name])
    if name in _SYMBOLS:
        return Token("name", "\\" + name)
    known = name in FUNCTIONS and FUNCTIONS[name].reading
    return Token("cmd", name) if known else Token("bad", "\\" + name)


def has_vowel(word: str) -> bool:
    return any(letter in "aeiouy" for letter in word.lower())


def split_word(word: str) -> list[Token]:
    """A run of bare letters as the product that it then is: `xsinx` -> x, sin, x."""
    out: list[Token] = []
    at = 0
    while at < len(word):
        match = _INSIDE.match(word, at)
        out.append(_command(_BARE[match[0]]) if match else Token("name", word[at]))
        at = match.end() if match else at + 1
    return out


# ----------------------------------------------------------------------------------------------------- the interface

_NORM = re.compile(
    r"(?:\||\\lvert)\s*\\(?:vec|mathbf|boldsymbol)\s*\{?\s*([A-Za-z])\s*\}?\s*(?:\\right|)(?:\||\\rvert)"
)  # |\vec v| is no |x|
_SECONDS = re.compile(r"(?<=\d)\s?\"")  # 36"
_ANSWER_PREFIX = re.compile(
    r"\s*(\\text(?:bf)?\s*\{)?\s*(?:the\s+)?(?:final\s+|correct\s+)?"
    r"answer\s*(?:is\b|:|=)+\s*:?\s*",
    re.IGNORECASE,
)
_MERIDIEM = re.compile(r"\b([ap])\.\s?m\b\.?", re.IGNORECASE)
_TIMES = re.compile(r"(\d)\s*x\s*(10\s*\^)")  # 3 x 10^8
_LIST = re.compile(
    r"(?:[(\[]|\\\{|\\langle)\s*\d{1,3}(?:,[1-9]\d\d)+\s*(?:\\right\s*)?(?:[)\]]|\\\}|\\rangle)"
)  # (100,200)
_CHOOSE = re.compile(r"(?<![\w})])(?:\{\})?[_^]\{?(\d+)\}?\s*\{?C\}?_\{?(\d+)\}?")  # _8C_3
_DOLLARS = re.compile(r"\bUS\s?(?=\\?\$)")  # US$5
_CIRC = re.compile(r"\^\s*(?:\{\s*\\circ(?![a-zA-Z])\s*([^{}]*)\}|\\circ(?![a-zA-Z]))")  # degrees
_POINT = re.compile(r"(?<=\d)\{([.:])\}(?=\d)")  # 1{.}5, 9{:}05
_QUOTED = re.compile(r"(\*{1,3}|'|_{1,3})([^*'_]+)\1")
_WORD_SIGNS = {
    **dict.fromkeys(("percent", "percents", "percentage", "pct"), "%"),
    **dict.fromkeys(("degree", "degrees"), "deg"),
    "and": "and",
    "or": "or",
}


def tokenize(text: str, lists: bool = False) -> list[Token]:
    """The tokens of an answer, ended by a token of kind "end".

    Args:
        text: the answer, at most `MAX_CHARS` characters.
        lists: read an ambiguous comma between digits (`1,234`) as a separator, not as a thousands mark.
    """
    text = to_ascii(text).strip()
    if (prefix := _ANSWER_PREFIX.match(text)) and prefix.end() < len(text):
        text = (prefix[1] or "") + text[prefix.end() :]
    text = _TIMES.sub(r"\1*\2", _MERIDIEM.sub(r"\1m", text))
    text = _NORM.sub(r"\\|\1\\|", _SECONDS.sub("''", text) if "'" in text else text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _LIST.sub(lambda found: found[0].replace(",", ", "), text))
    text = _POINT.sub(r"\1", _DOLLARS.sub("", text))
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[2]
    tokens: list[Token] = []
    for token in _Lexer(_CIRC.sub(r"\\degree \1", text) if "circ" in text else text, lists).run():
        if token.kind in ("text", "word") and token.text in _WORD_SIGNS:
            token = Token("op", _WORD_SIGNS[token.text])
        elif token.text == "}" and tokens and tokens[-1].text == "{" and token.kind == tokens[-1].kind == "op":
            tokens.pop()  # x^2{}y
            continue
        tokens.append(token)
    while tokens and tokens[-1].text in (".", ",", ";"):
        tokens.pop()
    words = tokens[1:-1] if tokens and tokens[0].text == "{" and tokens[-1].text == "}" else []
    if words and all(t.kind in ("text", "word") for t in words):  # {\rm odd}
        tokens = words
    if sum(t.kind == "word" for t in tokens) > 1 and all(t.kind == "word" and len(t.text) > 1 for t in tokens):
        tokens = [Token("text", t.text.lower()) for t in tokens]  # "all real numbers" is no product
    return tokens + [Token("end", "")]
