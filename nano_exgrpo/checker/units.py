"""Units of measurement for the answer checker: `5 cm`, `\\text{ km/h}`, `15 \\mbox{ cm}^2`, `\\$5`, `7 apples`.

The policy that they serve: a unit dropped or added is fine, a conflicting unit is not. So a unit is a product of
powers of dimensions and a factor to the dimension's base (90 minutes is 1.5 hours, but not 90 hours); words that
are no known unit ("apples") are a dimension of their own. "units" is no dimension at all, but square units are no
cubic ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from nano_exgrpo.checker.lexer import Token

# dimension: names of a unit = its size in the dimension's base; ... Names of three letters or more have a plural in -s.
_UNITS = """
length: m meter metre = 1; in inch inches = 127/5000; ft foot feet = 381/1250; yd yard = 1143/1250
length: mi mile = 201168/125; micron = 1/1000000; Å angstrom = 1/10000000000
time: s sec second = 1; min minute = 60; h hr hrs hour = 3600; day = 86400; week = 604800
months: month = 1; yr yrs year = 12
mass: g gram = 1
pounds: lb lbs pound = 1; oz ounce = 1/16
ton: ton tonne = 1
volume: L l liter litre = 1/1000
gallon: gal gallon = 1; quart = 1/4; pint = 1/8; cup = 1/16
dollar: $ dollar usd = 1; cent penny pennies = 1/100
euro: € euro eur = 1
sterling: £ gbp = 1
yen: ¥ yen = 1
rupee: rs rupee inr = 1
radian: rad radian = 1
speed: mph = 1397/3125; kph kmh = 5/18
hertz: Hz hz hertz = 1; khz = 1000; mhz = 1000000
newton: N newton = 1
joule: J joule = 1; kj = 1000
watt: W watt = 1; kw = 1000
volt: V volt = 1
ampere: A amp ampere = 1
pascal: Pa pa pascal = 1
kelvin: K kelvin = 1
celsius: celsius = 1
fahrenheit: fahrenheit = 1
mole: mol mole = 1
electronvolt: eV ev electronvolt = 1
erg: erg = 1
ohm: ohm \\Omega = 1
am: am AM = 1
pm: pm PM = 1
any: unit = 1
"""
NAMED: dict[str, tuple[str, Fraction]] = {}
for _line in _UNITS.strip().splitlines():
    _dimension, _, _units = _line.partition(": ")
    for _names, _, _size in (unit.partition(" = ") for unit in _units.split("; ")):
        for _name in _names.split():
            NAMED[_name] = NAMED[_name + "s" * (len(_name) > 2)] = _dimension, Fraction(_size)
_PREFIXES = dict(n=-9, nano=-9, u=-6, micro=-6, m=-3, milli=-3, c=-2, centi=-2, d=-1, deci=-1)
_PREFIXES |= dict(k=3, kilo=3, M=6, mega=6, G=9, giga=9, T=12, tera=12)
_PREFIXED = {  # units: their prefixes, with their case: 3 MW, 3 mW
    "m L l": "n u m c d k",
    "s": "n m",
    "g Hz N J W V A Pa eV mol \\Omega": "n m k M G T",
    "meter metre liter litre gram second joule watt hertz newton volt ampere pascal electronvolt "
    "meters metres liters litres grams seconds joules watts newtons volts amperes pascals": " ".join(
        word for word in _PREFIXES if len(word) > 1
    ),
}
for _names, _words in _PREFIXED.items():
    for _name, _word in ((name, word) for name in _names.split() for word in _words.split()):
        NAMED.setdefault(_word + _name, (NAMED[_name][0], NAMED[_name][1] * Fraction(10) ** _PREFIXES[_word]))
NAMED["\\mu"] = ("micro", Fraction(1, 10**6))
_DERIVED = {"volume": (("length", 3),), "speed": (("length", 1), ("time", -1)), "micro": ()}
NAMED["c"] = ("light", Fraction(1))  # GeV/c^2, but no letter that is a unit
DIMENSIONS = {dimension for dimension, _ in NAMED.values()}
SINGLE_LETTERS = {name for name in NAMED if len(name) == 1 and name.isalpha()} - {"c"} | {"\\Omega"}
_SUNS = {"\\odot", "\\oplus"}  # M_\\odot
NEUTRAL = {"st", "nd", "rd", "th", "total", "approximately", "approx", "only"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3, "cu": 3}
# Words that turn a number into a claim about it; a number they follow is not simply that number with a unit.
_NOT_UNITS = set(
    "is are was not or and if but to than then between least most less fewer about where when which "
    "that true false wrong incorrect given unknown such with either "
    "neither some any maybe "
    "ignore reference response score no yes none for plus minus because since so mod "
    "except excluded excluding without fails cannot never isn doesn rejected impossible below".split()
)


_ADJECTIVES = {"right", "correct"}  # units only before a noun: 14 right triangles


@dataclass(frozen=True, slots=True)
class Unit:
    """dims: dimension -> power, without zero powers; factor: the size of one such unit in the dimension's base."""

    dims: tuple[tuple[str, int], ...]
    factor: Fraction

    @staticmethod
    def named(name: str) -> Unit:
        return product([(name, 1)])

    def conflicts(self, other: Unit) -> bool:
        """Whether a number in the one unit cannot be the same number in the other.

        No unit at all does not conflict, nor do more words about the same thing (`students`, `happy students`).
        """
        if not self.dims or not other.dims:
            return False
        known = [
            [("length" if name == "any" else name, power) for name, power in unit.dims if name in DIMENSIONS]
            for unit in (self, other)
        ]  # square units are cm^2, not cm^3
        mine, theirs = (
            {word for name, _ in unit.dims if name not in DIMENSIONS for word in name.split()} for unit in (self, other)
        )
        return known[0] != known[1] or not (mine <= theirs or theirs <= mine)

    def converted(self, other: Unit) -> Fraction:
        """The number of these units in one of the others, of the same dimensions."""
        sizeless = not self.dims or not other.dims or "any" in dict(self.dims + other.dims)
        return Fraction(1) if sizeless else other.factor / self.factor


def product(powers: list[tuple[str, int]]) -> Unit:
    """The unit of named units and their powers; an unknown name is a dimension of its own."""
    dims: dict[str, int] = {}
    factor = Fraction(1)
    for name, power in powers:
        dimension, size = NAMED.get(name) or (name, Fraction(1))
        for part, part_power in _DERIVED.get(dimension, ((dimension, 1),)):
            dims[part] = dims.get(part, 0) + part_power * power
        factor *= size**power
    return Unit(tuple(sorted((d, p) for d, p in dims.items() if p)), factor)


def starts_symbol(tokens: list[Token], at: int) -> int:
    """The number of tokens of a unit written as a symbol, `M_\\odot` or `k\\Omega`; 0 for all else."""
    names = [token.text for token in tokens[at : at + 5]] + [""] * 5
    if names[1] == "_" and names[2] in _SUNS:
        return 3
    if names[1:3] == ["_", "{"] and names[3] in _SUNS and names[4] == "}":
        return 5
    if names[0] == "\\Omega":
        return int(tokens[at - 1].kind == "num" or tokens[at - 1].text == "}")
    return 2 * (names[1] == "\\Omega" and names[0] + names[1] in NAMED)


def parse_unit(tokens: list[Token], at: int) -> tuple[Unit, int] | None:
    """The unit that starts at `tokens[at]` and the index after it; None if nothing there reads as a unit."""
    powers: list[tuple[str, int]] = []  # of known units
    unknown: list[str] = []  # words that are none
    start, sign, next_power, bracket = at, 1, 1, False
    after_number = tokens[at - 1].kind in ("num", "text") or tokens[at - 1].text in ("}", ")", "!")
    while len(powers) + len(unknown) < 9:
        kind, name, *_ = tokens[at]
        if kind == "op" and name != "deg":
            if bracket and name == ")":
                at, bracket = at + 1, False
                continue
            opens = name == "/" and tokens[at + 1].text == "("  # J/(kg K)
            if name not in ("/", "*", ".", "-") or not powers and not unknown:
                break
            if tokens[at + 1 + opens].kind not in ("text", "word", "roman", "name", "cmd"):
                break
            sign, bracket, at = -1 if name == "/" else sign, bracket or opens, at + 1 + opens
            continue
        symbol, length = _symbol(tokens, at, powers)
        if not length:
            break
        at += length
        if tokens[at - 1].kind == "text" and tokens[at].text == ".":  # "sq. in."
            at += 1
        if symbol in ("per", "a") and powers:
            sign = -1
        elif symbol in ("squared", "cubed"):
            if not powers:  # "3 squared" is no 3
                at -= 1
                break
            powers[-1] = (powers[-1][0], powers[-1][1] * _POWERS[symbol])
        elif symbol in _POWERS:
            next_power = _POWERS[symbol]
        elif symbol in NEUTRAL:
            pass
        elif length > 1 or symbol in NAMED and (kind != "word" or after_number or powers):
            at, power = _exponent(tokens, at)
            if symbol in ("unit", "units") and tokens[at].text in ("squared", "cubed"):
                power, at = _POWERS[tokens[at].text], at + 1
            if symbol not in ("unit", "units") or next_power * power != 1:
                powers.append((symbol, sign * next_power * power))
            next_power = 1
        elif kind in ("text", "roman") and symbol not in _NOT_UNITS | _ADJECTIVES:
            unknown.append(symbol.removesuffix("s"))
        elif symbol in _ADJECTIVES and tokens[at].kind == "text":
            unknown.append(symbol)
        else:
            at -= 1
            break
    if at == start or bracket:
        return None
    return product(powers + [(" ".join(unknown), sign)] * bool(unknown)), at


def _symbol(tokens: list[Token], at: int, powers: list[tuple[str, int]]) -> tuple[str, int]:
    """The unit, or a word that may be one, at a token, and its number of tokens: 0 if it can be none."""
    kind, name, *_, written = tokens[at]
    unit = written if written in NAMED else name if name in NAMED else name.lower()
    if name == "deg" and tokens[at + 1].text in ("C", "F"):
        return {"C": "celsius", "F": "fahrenheit"}[tokens[at + 1].text], 2
    if kind in ("name", "roman") and (length := starts_symbol(tokens, at)):
        return name + tokens[at + length - 1 - (length == 5)].text * (length > 1), length
    if kind == "name" and name == "\\mu":
        return name, int(tokens[at + 1].kind == "roman")  # micro
    if kind == "name":
        after_energy = unit == "c" and powers and powers[-1][0].endswith("eV")
        return unit, int(bool(powers) and (unit in SINGLE_LETTERS or bool(after_energy)))
    return unit, int(kind in ("text", "word", "roman") or kind == "cmd" and name in ("min", "sec"))


def _exponent(tokens: list[Token], at: int) -> tuple[int, int]:
    """`^2`, `^{2}`, `^{-1}` after a unit: the index after it and the power."""
    if tokens[at].text != "^" or tokens[at].kind != "op":
        return at, 1
    inner = at + 1
    braced = tokens[inner].text == "{"
    inner += braced
    negative = tokens[inner].text == "-"
    inner += negative
    token = tokens[inner]
    if token.kind != "num" or token.text not in ("1", "2", "3", "4"):
        return at, 1
    inner += 1
    if braced:
        if tokens[inner].text != "}":
            return at, 1
        inner += 1
    return inner, -int(token.text) if negative else int(token.text)
