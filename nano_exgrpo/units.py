"""Units of measurement for the answer checker: `5 cm`, `\\text{ km/h}`, `15 \\mbox{ cm}^2`, `\\$5`, `7 apples`.

The policy that they serve: a unit dropped or added is fine, a conflicting unit is not. So a unit is a product of
powers of dimensions and a factor to the dimension's base (90 minutes is 1.5 hours, but not 90 hours); words that
are no known unit ("apples") are a dimension of their own, and "units" is no dimension at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from nano_exgrpo.tokens import Token

_TABLE = """
length 1 m meter meters metre metres
length 1/100 cm centimeter centimeters centimetre centimetres
length 1/1000 mm millimeter millimeters millimetre millimetres
length 1000 km kilometer kilometers kilometre kilometres
length 1/1000000000 nm nanometer nanometers
length 1/1000000 um micron microns micrometer micrometers
micro 1/1000000 micro
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
volume 1 L l liter liters litre litres
volume 1/1000 ml mL milliliter milliliters millilitre millilitres
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
hertz 1000 khz kHz
hertz 1000000 mhz MHz
newton 1 N newton newtons
joule 1 J joule joules
joule 1000 kJ kilojoules
watt 1 W watt watts
watt 1000 kW kilowatt kilowatts
volt 1 V volt volts
ampere 1 A amp amps ampere amperes
pascal 1 pa Pa pascal pascals
kelvin 1 K kelvin kelvins
celsius 1 celsius
fahrenheit 1 fahrenheit
mole 1 mol mole moles
electronvolt 1 eV ev
erg 1 erg ergs
ohm 1 ohm ohms
am 1 am AM
pm 1 pm PM
"""
NAMED = {name: (row.split()[0], Fraction(row.split()[1])) for row in _TABLE.strip().splitlines() for name in row.split()[2:]}
SINGLE_LETTERS = {name for name in NAMED if len(name) == 1 and name.isalpha()} | {"\\Omega"}
NEUTRAL = {"unit", "units", "st", "nd", "rd", "th", "total", "approximately", "approx"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3, "cu": 3}
# Words that turn a number into a claim about it; a number they follow is not simply that number with a unit.
_NOT_UNITS = set("is are was not or and if but to than then between least most more less about where when which that true "
                 "false wrong incorrect correct right answer answers given unknown such with only either neither some any maybe "
                 "ignore reference response score no yes none for times plus minus because since so mod".split())


@dataclass(frozen=True, slots=True)
class Unit:
    """dims: dimension -> power, without zero powers; factor: the size of one such unit in the dimension's base."""

    dims: tuple[tuple[str, int], ...]
    factor: Fraction

    @staticmethod
    def named(*names: str) -> Unit:
        return _product([(name, 1) for name in names])


def _product(powers: list[tuple[str, int]]) -> Unit:
    dims: dict[str, int] = {}
    factor = Fraction(1)
    for name, power in powers:
        dimension, size = NAMED.get(name) or (name, Fraction(1))
        if dimension == "micro":                                  # a prefix
            pass
        elif dimension == "volume":
            dimension, size, power3 = "length", size / 1000, 3 * power
            dims[dimension] = dims.get(dimension, 0) + power3
        elif dimension == "speed":
            dims["length"], dims["time"] = dims.get("length", 0) + power, dims.get("time", 0) - power
        else:
            dims[dimension] = dims.get(dimension, 0) + power
        factor *= size ** power
    return Unit(tuple(sorted((d, p) for d, p in dims.items() if p)), factor)


def parse_unit(tokens: list[Token], at: int) -> tuple[Unit, int] | None:
    """The unit that starts at `tokens[at]` and the index after it; None if nothing there reads as a unit."""
    powers: list[tuple[str, int]] = []
    unknown: list[str] = []
    pending, sign, start = 1, 1, at
    previous = tokens[at - 1]
    while len(powers) + len(unknown) < 7:
        kind, name, *_ = tokens[at]
        if name == "\\mu" and tokens[at + 1].text in ("m", "g", "s", "L") and tokens[at + 1].kind == "roman":
            powers.append(("micro", sign))
            at += 1
            continue
        if kind == "cmd" and name in ("min", "sec"):
            kind = "word"
        if kind in ("text", "word", "roman") or kind == "name" and powers:
            spelled = name if name in NAMED else name.lower()
            if kind == "name" and spelled not in SINGLE_LETTERS:
                break
            if spelled in ("per", "a") and powers:
                sign = -1
            elif spelled in _POWERS and spelled.endswith("ed") and powers:
                powers[-1] = (powers[-1][0], powers[-1][1] * _POWERS[spelled])
            elif spelled in _POWERS:
                pending = _POWERS[spelled]
            elif spelled in NEUTRAL:
                pending = 1
            elif spelled in NAMED and not (kind == "word" and previous.kind not in ("num",) and previous.text not in ("}", ")", "!")):
                powers.append((spelled, sign * pending))
                pending = 1
            elif kind in ("text", "roman") and spelled not in _NOT_UNITS:
                unknown.append(spelled.removesuffix("s"))
            else:
                break
            at += 1
            if tokens[at].text == "." and kind == "text":
                at += 1
            at, power = _exponent(tokens, at)
            if power != 1 and powers and spelled in NAMED:
                powers[-1] = (spelled, powers[-1][1] * power)
        elif kind == "op" and name == "/" and (powers or unknown) and tokens[at + 1].kind in ("text", "word", "roman", "name", "cmd"):
            sign, at = -1, at + 1
        elif kind == "op" and name in ("*", ".", "-") and powers and tokens[at + 1].kind in ("text", "word", "roman"):
            at += 1
        else:
            break
    if at == start:
        return None
    if unknown:
        powers.append((" ".join(unknown), sign))
    return _product(powers), at


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
