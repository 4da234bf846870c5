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

_TABLE = """
length 1 m meter meters metre metres
length 1/100 cm centimeter centimeters centimetre centimetres
length 1/1000 mm millimeter millimeters millimetre millimetres
length 1000 km kilometer kilometers kilometre kilometres
length 1/1000000000 nm nanometer nanometers
length 1/1000000 um micron microns micrometer micrometers
length 127/5000 in inch inches
length 381/1250 ft foot feet
length 1143/1250 yd yard yards
length 201168/125 mi mile miles
time 1 s sec secs second seconds
time 1/1000 ms millisecond milliseconds
time 60 min mins minute minutes
time 3600 h hr hrs hour hours
time 86400 day days
time 604800 week weeks
months 1 month months
months 12 yr yrs year years
mass 1 g gram grams
mass 1000 kg kilogram kilograms
mass 1/1000 mg milligram milligrams
pounds 1 lb lbs pound pounds
pounds 1/16 oz ounce ounces
ton 1 ton tons tonne tonnes
volume 1/1000 L l liter liters litre litres
volume 1/1000000 ml mL milliliter milliliters millilitre millilitres
gallon 1 gal gallon gallons
gallon 1/4 quart quarts
gallon 1/8 pint pints
gallon 1/16 cup cups
dollar 1 $ dollar dollars usd
dollar 1/100 cent cents penny pennies
euro 1 € euro euros eur
sterling 1 £ gbp
yen 1 ¥ yen
radian 1 rad radian radians
speed 1397/3125 mph
speed 5/18 kph kmh
hertz 1 hz Hz hertz
hertz 1000 khz
hertz 1000000 mhz
newton 1 N newton newtons
joule 1 J joule joules
joule 1000 kj kilojoule kilojoules
watt 1 W watt watts
watt 1000 kw kilowatt kilowatts
volt 1 V volt volts
ampere 1 A amp amps ampere amperes
pascal 1 pa Pa pascal pascals
kelvin 1 K kelvin kelvins
celsius 1 celsius
fahrenheit 1 fahrenheit
mole 1 mol mole moles
electronvolt 1 eV ev electronvolt electronvolts
erg 1 erg ergs
ohm 1 ohm ohms
am 1 am AM
pm 1 pm PM
rupee 1 rs rupee rupees inr
any 1 units unit
"""
_ROWS = [row.split() for row in _TABLE.strip().splitlines()]
NAMED = {name: (dimension, Fraction(size)) for dimension, size, *names in _ROWS for name in names}
NAMED["\\mu"] = ("micro", Fraction(1, 10**6))
_PREFIXES = {"n": -9, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12}
for _prefix, _power in _PREFIXES.items():  # 3 MW, 3 mW: with their case
    for _symbol in ("g", "Hz", "N", "J", "W", "V", "A", "Pa", "eV", "mol"):
        NAMED.setdefault(_prefix + _symbol, (NAMED[_symbol][0], NAMED[_symbol][1] * Fraction(10) ** _power))
_DERIVED = {"volume": (("length", 3),), "speed": (("length", 1), ("time", -1)), "micro": ()}
DIMENSIONS = {dimension for dimension, _ in NAMED.values()}
SINGLE_LETTERS = {name for name in NAMED if len(name) == 1 and name.isalpha()} | {"\\Omega"}
NEUTRAL = {"st", "nd", "rd", "th", "total", "approximately", "approx", "only"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3, "cu": 3}
# Words that turn a number into a claim about it; a number they follow is not simply that number with a unit.
_NOT_UNITS = set(
    "is are was not or and if but to than then between least most more less about where when which "
    "that true false wrong incorrect correct right answer answers given unknown such with either "
    "neither some any maybe "
    "ignore reference response score no yes none for times plus minus because since so mod "
    "except excluded excluding without fails cannot never isn doesn rejected impossible below".split()
)


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


def parse_unit(tokens: list[Token], at: int) -> tuple[Unit, int] | None:
    """The unit that starts at `tokens[at]` and the index after it; None if nothing there reads as a unit."""
    powers: list[tuple[str, int]] = []  # of known units
    unknown: list[str] = []  # words that are none
    start, sign, next_power = at, 1, 1
    after_number = tokens[at - 1].kind in ("num", "text") or tokens[at - 1].text in ("}", ")", "!")
    while len(powers) + len(unknown) < 7:
        kind, name, *_, written = tokens[at]
        unit = written if written in NAMED else name if name in NAMED else name.lower()
        if name == "deg" and tokens[at + 1].text in ("C", "F"):
            powers.append(({"C": "celsius", "F": "fahrenheit"}[tokens[at + 1].text], 1))
            at += 2
            continue
        if kind == "name":
            if name == "\\mu" and tokens[at + 1].kind == "roman":  # micro
                unit = name
            elif not powers or unit not in SINGLE_LETTERS:
                break
        elif kind == "op":
            if not powers and not unknown or tokens[at + 1].kind not in ("text", "word", "roman", "name", "cmd"):
                break
            if name == "/":
                sign = -1
            elif name not in ("*", ".", "-"):
                break
            at += 1
            continue
        elif kind not in ("text", "word", "roman") and not (kind == "cmd" and name in ("min", "sec")):
            break
        at += 1
        if kind == "text" and tokens[at].text == ".":  # "sq. in."
            at += 1
        if unit in ("per", "a") and powers:
            sign = -1
        elif unit in ("squared", "cubed") and powers:
            powers[-1] = (powers[-1][0], powers[-1][1] * _POWERS[unit])
        elif unit in ("squared", "cubed"):  # "3 squared" is no 3
            at -= 1
            break
        elif unit in _POWERS:
            next_power = _POWERS[unit]
        elif unit in NEUTRAL:
            pass
        elif unit in ("unit", "units"):
            at, power = _exponent(tokens, at)
            if next_power * power != 1:
                powers.append((unit, sign * next_power * power))
            next_power = 1
        elif unit in NAMED and (kind != "word" or after_number or powers):
            at, power = _exponent(tokens, at)
            powers.append((unit, sign * next_power * power))
            next_power = 1
        elif kind in ("text", "roman") and unit not in _NOT_UNITS:
            unknown.append(unit.removesuffix("s"))
        else:
            at -= 1
            break
    if at == start:
        return None
    return product(powers + [(" ".join(unknown), sign)] * bool(unknown)), at


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
