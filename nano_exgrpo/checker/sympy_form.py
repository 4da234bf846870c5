"""From trees to sympy, and sympy's canonical forms as the exact arbiter of the answer checker.

`to_sympy(tree)` builds sympy objects one by one from the leaves up (`latex.parse_latex` does it for a text); no
string ever reaches sympy. Sizes are looked at before each power, root, factorial and function, so that sympy's
automatic evaluation cannot start anything long; what is too large has no form. `same_form` compares two trees by
what sympy does by itself and a bounded `expand` and `together`, never `simplify`: see `comparison` for when it is
asked.

sympy is imported on first use: it takes a quarter of a second, and most verdicts never need it.
"""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from functools import cache, reduce
from types import ModuleType
from typing import TYPE_CHECKING

from nano_exgrpo.checker.evaluator import Evaluator
from nano_exgrpo.checker.functions import FUNCTIONS, Undefined
from nano_exgrpo.checker.parser import ParseError
from nano_exgrpo.checker.tree import TRANSPOSED, Based, Matrix, Node, Num, Op, Rel, Seq, Sym, infinity

if TYPE_CHECKING:
    import sympy

MAX_NODES = 120  # of a tree
MAX_BITS = 20_000  # of the rational numbers in a whole power
MAX_ROOT_BITS = 300  # ... in an argument of a root or function, where sympy looks for factors
MAX_TERMS = 40  # of an expansion
MAX_POWER = 8  # ... of a sum
MAX_SIMPLE = 4  # terms, and symbols, of an argument of functions that look for factors or signs
DIGITS = 100  # to which a canonical difference may be computed

_SEARCHING = {"abs", "sgn", "arg", "min", "max", "mod", "floor", "ceil"}
_WHOLE = {"factorial": 1_000, "factorial2": 1_000, "binom": 2_000, "gcd": math.inf, "lcm": math.inf}  # largest argument
_RELATIONS = {"=": "Eq", "!=": "Ne", "<": "Lt", ">": "Gt", "<=": "Le", ">=": "Ge"}
_SETS = {"cup": "Union", "cap": "Intersection", "setminus": "Complement"}


# What sympy, and our own arithmetic, raise where objects do not fit: a set in a sum, matrices of different shape.
_ERRORS = ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError


class NoForm(ParseError):
    """An answer without a sympy form (a unit, words, plus-minus), or without one of bounded size."""


@cache
def _sympy() -> ModuleType:
    import sympy

    return sympy


def to_sympy(tree: Node) -> sympy.Basic:
    """The sympy object of a tree: an expression, relation, tuple, set, interval or matrix.

    Symbols are plain `sympy.Symbol`s without their backslash (`alpha`, `x_1`); lists, ordered or not, are `Tuple`s;
    `i` and `e` are the constants. An angle in degrees is its number, except inside a trigonometric function.

    Raises:
        NoForm: sympy has no such object, or it would be too large.
    """
    try:
        form = _Builder().build(tree)
    except NoForm:
        raise
    except _ERRORS as error:
        raise NoForm(f"no sympy form: {error}") from None
    if form.has(_sympy().zoo, _sympy().nan):
        raise NoForm("undefined")
    return form


class _Builder:
    """One tree on its way to sympy: nodes seen so far, variables bound by sums, integrals and limits."""

    def __init__(self) -> None:
        self.sympy = _sympy()
        self.nodes = 0
        self.bound: set[str] = set()

    def build(self, node: Node) -> sympy.Basic:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise NoForm(f"more than {MAX_NODES} nodes")
        match node:
            case Num():
                return self.sympy.Rational(node.value.numerator, node.value.denominator)
            case Sym():
                return self.symbol(node.name)
            case Op():
                return self.operation(node.head, node.args)
            case Seq():
                return self.container(node)
            case Rel():
                return self.relation(node)
            case Matrix():
                rows = [[self.build(cell) for cell in row] for row in node.rows]
                if not all(isinstance(cell, self.sympy.Expr) for row in rows for cell in row):
                    raise NoForm("a matrix of other things than expressions")
                return self.sympy.ImmutableMatrix(rows)
            case Based() if node.base.isdigit() and 2 <= int(node.base) <= 36 and node.digits.isdigit():
                if max(map(int, node.digits)) < int(node.base):
                    return self.sympy.Integer(int(node.digits, int(node.base)))
        raise NoForm(f"sympy has no {type(node).__name__.lower()}")

    def symbol(self, name: str) -> sympy.Symbol:
        if name.startswith("text "):
            raise NoForm("words have no sympy form")
        return self.sympy.Symbol(name.lstrip("\\"))

    def operation(self, head: str, args: tuple) -> sympy.Basic:
        sympy = self.sympy
        if head in ("sum", "prod", "int", "lim"):
            return self.big(head, *args)
        if head in ("call", "sub"):
            return self.opaque(head, *args)
        if head == "i" and "i" in self.bound:
            return self.symbol("i")
        if head == "reals":
            return sympy.S.Reals
        if not args and head in FUNCTIONS and FUNCTIONS[head].sympy:
            return getattr(sympy, FUNCTIONS[head].sympy)
        if head == "^" and args[1] in TRANSPOSED and isinstance(args[0], Matrix):
            return self.build(args[0]).T
        values = [self.build(arg) for arg in args]
        if head in _SETS:
            return getattr(sympy, _SETS[head])(*values)
        if not all(isinstance(value, sympy.Expr | sympy.MatrixBase) for value in values):
            raise NoForm(f"no arithmetic with a {type(values[0]).__name__}")
        match head, values:
            case "+" | "mixed", _:
                return reduce(operator.add, values)
            case "*", _:
                return reduce(operator.mul, values)
            case "/", [_, bottom] if bottom.is_zero:
                raise NoForm("division by zero")
            case "/", [top, bottom]:
                return top / bottom
            case "neg", [value]:
                return -value
            case "percent", [value]:
                return value / 100
            case "degree", [value]:
                return value
            case "radians", [value]:
                return value * sympy.pi / 180
            case "^", [base, exponent]:
                return self.power(base, exponent)
            case "sqrt" | "cbrt", [value]:
                return self.power(value, sympy.Rational(1, 2 if head == "sqrt" else 3))
            case "root", [value, index] if not index.is_zero:
                if index.is_Integer and index % 2 and value.is_negative:
                    return -self.power(-value, 1 / index)  # the real root of odd index
                return self.power(value, 1 / index)
            case "logbase", [value, base]:
                return self.function("ln", args[:1], [value]) / self.function("ln", args[1:], [base])
            case "det", [matrix] if matrix.rows == matrix.cols and matrix.rows <= 4:
                return matrix.det(method="berkowitz")
        return self.function(head, args, values)

    def bits(self, *forms: sympy.Expr) -> int:
        """The size of all rational numbers in some expressions."""
        numbers = [number for form in forms for number in form.atoms(self.sympy.Rational)]
        return sum(number.p.bit_length() + number.q.bit_length() for number in numbers)

    def power(self, base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
        if exponent.is_Integer and not base.is_Matrix:
            if self.bits(base) * abs(int(exponent)) > MAX_BITS and base not in (-1, 0, 1):
                raise NoForm("too large a power")
        elif base.is_Matrix or self.bits(base, exponent) > MAX_ROOT_BITS:
            raise NoForm("too large a power")
        elif exponent.is_Rational and self.bits(base) * abs(exponent) > MAX_BITS:
            raise NoForm("too large a power")
        return base**exponent

    def function(self, head: str, args: tuple, values: list) -> sympy.Expr:
        name = FUNCTIONS[head].sympy if head in FUNCTIONS else ""
        if not name or not all(isinstance(value, self.sympy.Expr) for value in values):
            raise NoForm(f"sympy has no form for {head!r}")
        if self.bits(*values) > MAX_ROOT_BITS or len(values) > 6:
            raise NoForm(f"too large an argument of {head}")
        if head in _WHOLE:
            numbers = [value for value in values if value.is_number]
            if (
                not all(n.is_Integer and abs(n) <= _WHOLE[head] for n in numbers)
                or head in ("gcd", "lcm")
                and (len(numbers) < len(values))
            ):
                raise NoForm(f"no {head} of this")
        if head in ("floor", "ceil", "mod"):
            if all(value.is_number for value in values):  # of a constant: from our own bounded arithmetic
                try:
                    whole = Evaluator(0, True, [2_000]).value(Op(head, args))
                except Undefined as error:
                    raise NoForm(str(error)) from None
                return self.sympy.Rational(whole.numerator, whole.denominator)
            if any(
                part.is_number and not part.is_Rational
                for value in values
                for part in self.sympy.preorder_traversal(value)
            ):
                raise NoForm(f"{head} of an irrational number")
        if head in _SEARCHING and not all(map(self.is_simple, values)):
            raise NoForm(f"{head} of a long expression")
        if head in ("gcd", "lcm"):
            return self.sympy.Integer(getattr(math, head)(*map(int, values)))
        return getattr(self.sympy, name)(*values)

    def is_simple(self, form: sympy.Expr) -> bool:
        """Whether an expression is short and of low degree. Then sympy soon finds its common factors and signs."""
        powers = form.atoms(self.sympy.Pow)
        return (
            _terms(form) <= MAX_SIMPLE
            and len(form.free_symbols) <= MAX_SIMPLE
            and all(not power.exp.is_Integer or abs(power.exp) <= MAX_POWER for power in powers)
        )

    def opaque(self, head: str, name: Node | str, *args: Node | str) -> sympy.Expr:
        """f(x) is an applied function, x_1 a symbol, a_{n+1} an indexed one."""
        if not isinstance(name, Sym) or any(isinstance(arg, str) for arg in args):
            raise NoForm("a derivative or prime")
        title = self.symbol(name.name).name
        if head == "call":
            return self.sympy.Function(title)(*map(self.build, args))
        if isinstance(args[0], Num):
            return self.symbol(f"{title}_{args[0].value}")
        return self.sympy.IndexedBase(title)[self.build(args[0])]

    def big(self, head: str, low: Node, high: Node, body: Node) -> sympy.Expr:
        """Sums, products, limits and integrals, not evaluated."""
        if head == "int":
            factors = body.args if isinstance(body, Op) and body.head == "*" else ()
            if len(factors) < 2 or factors[-2] != Sym("d") or not isinstance(factors[-1], Sym):
                raise NoForm("an integral without dx at its end")
            variable, body = factors[-1], Op("*", factors[:-2]) if factors[:-2] else Num(Fraction(1))
        elif isinstance(low, Rel) and low.ops == ["->" if head == "lim" else "="]:
            variable, low = low.terms
        else:
            raise NoForm(f"{head} without its variable")
        name = variable.name if isinstance(variable, Sym) else variable.head if variable == Op("i") else None
        if name is None or name in self.bound:
            raise NoForm("a bound variable that is none")
        ends = (
            []
            if low == high == Op("...")
            else [self.build(low)]
            if head == "lim"
            else [self.build(low), self.build(high)]
        )
        self.bound.add(name)
        inner, symbol = self.build(body), self.symbol(name)
        self.bound.discard(name)
        if head == "lim":
            return self.sympy.Limit(inner, symbol, ends[0], dir="-" if ends[0] == self.sympy.oo else "+-")
        kind = {"sum": "Sum", "prod": "Product", "int": "Integral"}[head]
        return getattr(self.sympy, kind)(inner, (symbol, *ends))

    def container(self, node: Seq) -> sympy.Basic:
        sympy, items = self.sympy, [self.build(item) for item in node.items]
        if node.kind == "set":
            return sympy.FiniteSet(*items)
        if len(items) == 2 and node.kind == "tuple" and (node.ends != "()" or any(map(infinity, node.items))):
            return sympy.Interval(*items, left_open=node.ends[0] == "(", right_open=node.ends[1] == ")")
        return sympy.Tuple(*items)

    def relation(self, rel: Rel) -> sympy.Basic:
        terms = [self.build(term) for term in rel.terms]
        if rel.ops == ["in"]:
            return self.sympy.Contains(*terms)
        if not set(rel.ops) <= set(_RELATIONS):
            raise NoForm(f"sympy has no relation {' '.join(rel.ops)}")
        parts = [
            getattr(self.sympy, _RELATIONS[op])(x, y, evaluate=False) for op, x, y in zip(rel.ops, terms, terms[1:])
        ]
        return parts[0] if len(parts) == 1 else self.sympy.And(*parts, evaluate=False)


def same_form(a: Node, b: Node) -> bool | None:
    """True if sympy's canonical forms of two scalars are the same, False if they differ by a number that is not
    zero, None if it cannot tell."""
    sympy = _sympy()
    try:
        x, y = (to_sympy(node).as_dummy() for node in (a, b))  # bound variables renamed alike
        if x == y:
            return True
        if not isinstance(x, sympy.Expr) or not isinstance(y, sympy.Expr):
            return None
        difference = expanded(x - y)
        if difference != 0:
            difference = expanded(sympy.together(difference).as_numer_denom()[0]) and difference
        if difference == 0:
            return True
        if difference.is_number and not difference.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit):
            Evaluator(0, True, [2_000]).value(Op("+", (a, b)))  # Undefined where evalf could take long
            return False if difference.evalf(5, maxn=DIGITS, strict=True) != 0 else None
    except _ERRORS:
        pass  # among them sympy's PrecisionExhausted
    return None


def expanded(form: sympy.Expr) -> sympy.Expr:
    """`sympy.expand`, if it makes at most `MAX_TERMS` terms."""
    _terms(form)
    return form.expand()


def _terms(form: sympy.Expr) -> int:
    """The number of terms that expansion would make.

    Raises:
        NoForm: it is more than `MAX_TERMS`, here or in an argument.
    """
    inner = [_terms(arg) for arg in form.args]
    if form.is_Add:
        count = sum(inner)
    elif form.is_Mul:
        count = math.prod(inner)
    elif form.is_Pow and form.exp.is_Rational and inner[0] > 1:
        power = abs(int(form.exp))  # (x + y)^(5/2) is expanded, too
        if power > MAX_POWER:
            raise NoForm(f"a sum to the power of more than {MAX_POWER}")
        count = math.comb(inner[0] + power - 1, power)
    else:
        count = 1
    if count > MAX_TERMS:
        raise NoForm(f"more than {MAX_TERMS} terms")
    return count
