"""The trees of the answer checker: what an answer is, once it is read.

A scalar is a `Num`, `Sym` or `Op`; the other nodes are the containers and statements that answers are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from nano_exgrpo.checker.units import SINGLE_LETTERS, Unit, product


@dataclass(slots=True)
class Num:
    """A rational literal; `digits`: significant digits if it was written as a decimal, else 0."""

    value: Fraction
    digits: int = 0


@dataclass(slots=True)
class Sym:
    """A symbol, subscripts and primes included in its name."""

    name: str


@dataclass(slots=True)
class Op:
    """An operation: head "+", "*", "/", "^", "neg", "pm", "mp", a function's name, "pi", "call", "sub", ..."""

    head: str
    args: tuple = ()


@dataclass(slots=True)
class Seq:
    """kind "list" (unordered), "or" (alternatives), "set" (braces), "tuple" (ordered; ends as written)."""

    kind: str
    items: list
    ends: str = "()"


@dataclass(slots=True)
class Rel:
    """A chain of relations: terms[0] ops[0] terms[1] ops[1] ..."""

    terms: list
    ops: list[str]


@dataclass(slots=True)
class Matrix:
    """Rows of the same length."""

    rows: list[list]


@dataclass(slots=True)
class Quantity:
    """A value with a unit of measurement."""

    value: object
    unit: Unit


@dataclass(slots=True)
class Based:
    """A numeral in a stated base, compared as written."""

    digits: str
    base: str


@dataclass(slots=True)
class Ratio:
    """`3:4`, `1:2:3` or a time, `7:30`; `clock`: 1 if it may be a time by its digits, 2 if it must be (`3:05`)."""

    parts: list
    clock: int = 0


INEQUALITIES = {"<", ">", "<=", ">=", "!="}
FUNCTION_LETTERS = set("fghFG")  # f(x) is never f times x
TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc"}
TRANSPOSED = (Sym("T"), Sym("\\top"))  # exponents
Node = Num | Sym | Op | Seq | Rel | Matrix | Quantity | Based | Ratio

# ------------------------------------------------------------------------------------------------ walking the tree


def children(node: Node) -> list[Node]:
    """The nodes directly below a node."""
    match node:
        case Op():
            return [arg for arg in node.args if not isinstance(arg, str)]
        case Seq():
            return node.items
        case Rel():
            return node.terms
        case Matrix():
            return [cell for row in node.rows for cell in row]
        case Ratio():
            return node.parts
        case Quantity():
            return [node.value]
    return []


def rebuilt(node: Node, change: Callable[[Node], Node]) -> Node:
    """A copy of a node with each node directly below it changed, from left to right."""
    match node:
        case Op():
            return Op(node.head, tuple(arg if isinstance(arg, str) else change(arg) for arg in node.args))
        case Seq():
            return Seq(node.kind, [change(item) for item in node.items], node.ends)
        case Rel():
            return Rel([change(term) for term in node.terms], node.ops)
        case Matrix():
            return Matrix([[change(cell) for cell in row] for row in node.rows])
        case Ratio():
            return Ratio([change(part) for part in node.parts], node.clock)
        case Quantity():
            return Quantity(change(node.value), node.unit)
    return node


def drawn(node: Node | str) -> str:
    """A tree in one line, operators first: `(+ (^ x 2) 1)`."""
    match node:
        case Num():
            return f"{node.value}" + f" [{node.digits} digits]" * bool(node.digits)
        case Sym():
            return node.name
        case Op():
            return f"({' '.join([node.head, *map(drawn, node.args)])})" if node.args else node.head
        case Seq():
            left, right = {"set": "{}", "tuple": node.ends}.get(node.kind, ("", ""))
            return f"{node.kind}{left or '<'}{', '.join(map(drawn, node.items))}{right or '>'}"
        case Rel():
            return drawn(node.terms[0]) + "".join(f" {op} {drawn(term)}" for op, term in zip(node.ops, node.terms[1:]))
        case Matrix():
            return "matrix[" + "; ".join(", ".join(map(drawn, row)) for row in node.rows) + "]"
        case Ratio():
            return "ratio<" + " : ".join(map(drawn, node.parts)) + ">"
        case Quantity():
            unit = " ".join(f"{name}^{power}" for name, power in node.unit.dims) or "no dimension"
            return f"{drawn(node.value)} [{unit}; factor {node.unit.factor}]"
        case Based():
            return f"{node.digits} in base {node.base}"
    return str(node)


def height(tree: Node, limit: int) -> int:
    """The height of a tree, up to `limit`, found without recursion."""
    level, deepest = [tree], 0
    while level and deepest < limit:
        level = [child for node in level for child in children(node)]
        deepest += 1
    return deepest


def contents(tree: Node) -> tuple[set[str], set[str]]:
    """The names of all symbols and the heads of all operations in a tree."""
    names: set[str] = set()
    heads: set[str] = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Sym):
            names.add(node.name)
        elif isinstance(node, Op):
            heads.add(node.head)
        stack += children(node)
    return names, heads


def literals(node: Node) -> list[Fraction]:
    """The numerals in a tree."""
    found = [value for child in children(node) for value in literals(child)]
    return [node.value, *found] if isinstance(node, Num) else found


def symbols(tree: Node) -> set[str]:
    return contents(tree)[0]


def substitute(node: Node, values: dict[str, Node]) -> Node:
    """The tree with symbols replaced."""
    if isinstance(node, Sym):
        return values.get(node.name, node)
    return rebuilt(node, lambda child: substitute(child, values))


def absolute_values(node: Node) -> list[Op]:
    """The outermost absolute values in a tree."""
    if isinstance(node, Op) and node.head == "abs":
        return [node]
    return [found for child in children(node) for found in absolute_values(child)]


def replaced(node: Node, old: Node, new: Node) -> Node:
    """The tree with one of its nodes replaced."""
    return new if node is old else rebuilt(node, lambda child: replaced(child, old, new))


def choose_signs(node: Node, signs: list[int], together: bool) -> Node:
    """The tree with its plus-minus signs chosen: in order from `signs`, or all alike (minus-plus: opposite)."""
    if isinstance(node, Op) and node.head in ("pm", "mp"):
        sign = signs[0] if together else signs.pop(0)
        inner = choose_signs(node.args[0], signs, together)
        return inner if (sign > 0) == (node.head == "pm") else Op("neg", (inner,))
    return rebuilt(node, lambda child: choose_signs(child, signs, together))


def count_signs(node: Node) -> int:
    """The number of plus-minus signs in a tree."""
    return (isinstance(node, Op) and node.head == "pm") + sum(map(count_signs, children(node)))


def derivative_of(node: Node) -> tuple[str, int, str] | None:
    """(y, order, x or "") of dy/dx, y', y'(x), \\dot y; None for all else."""
    if isinstance(node, Sym):
        name = node.name.rstrip("'")
        dots = {"\\dot": 1, "\\ddot": 2}.get(name.partition(" ")[0], 0)
        order = dots or len(node.name) - len(name)
        return (name.partition(" ")[2] if dots else name, order, "") if order else None
    if not isinstance(node, Op) or node.head != "call" or not isinstance(node.args[-1], Sym | Op):
        return None
    title, variable = node.args[0], node.args[-1]
    if title != "d":
        found = derivative_of(title) if isinstance(title, Sym) and isinstance(variable, Sym) else None
        return found and (*found[:2], variable.name)
    order, function = node.args[1:3]
    if isinstance(function, Op) and function.head == "call":  # dy(t)/dt
        function = function.args[0]
    variable = variable.args[0] if isinstance(variable, Op) and variable.head == "^" else variable
    if not all(isinstance(part, kind) for part, kind in ((order, Num), (function, Sym), (variable, Sym))):
        return None
    return function.name, int(order.value), variable.name


def derivatives(node: Node) -> set[tuple[str, int, str]]:
    """All derivatives in a tree."""
    found = derivative_of(node)
    return {found} if found else {d for child in children(node) for d in derivatives(child)}


def primed(node: Node, functions: set[str]) -> Node:
    """The tree of a differential equation with y' for each derivative and y for y(x)."""
    found = derivative_of(node)
    if found:
        return Sym(found[0] + "'" * found[1])
    if isinstance(node, Op) and node.head == "call" and isinstance(node.args[-1], Sym):
        if isinstance(node.args[0], Sym) and node.args[0].name in functions:
            return node.args[0]
    return rebuilt(node, lambda child: primed(child, functions))


# ------------------------------------------------------------------------------------------------ questions of form


def is_constant(node: Node) -> bool:
    return isinstance(node, Num | Op | Quantity) and not symbols(node)


def infinity(node: Node) -> int:
    """1 for infinity, -1 for minus infinity, 0 for all else."""
    if isinstance(node, Op) and node.head == "inf":
        return 1
    if isinstance(node, Op) and node.head == "neg":
        return -infinity(node.args[0])
    return 0


def is_label(node: Node) -> bool:
    """Whether a tree can name a value: x, x_1, f(x), P(A | B), |AB|, AB, the angle ABC, m + n, (p, q)."""
    if isinstance(node, Sym):
        return True
    if isinstance(node, Seq):
        return node.kind == "tuple" and all(map(is_label, node.items))
    if isinstance(node, Ratio):
        return all(map(is_label, node.parts))
    if not isinstance(node, Op):
        return False
    head, names = node.head, symbols(node)
    if head == "call":  # f(x + 1) = x^2 is an equation for f
        name = node.args[0].name if isinstance(node.args[0], Sym) else ""
        return name[:1] not in FUNCTION_LETTERS or not any(
            isinstance(arg, Op) and arg.head in ("+", "*", "/", "^") and symbols(arg) for arg in node.args
        )
    if head in ("sum", "prod", "int", "lim"):
        return bool(contents(node)[1] & {"call", "sub"})
    if head == "abs" or head in TRIGONOMETRIC:  # |AB|, |z|, cos A, but |x| = 6 is an equation
        return bool(names) and all(name[:1].isupper() or name[:1] in "z\\" for name in names)
    if head in ("min", "max", "gcd", "lcm", "arg", "det"):
        return all(symbols(arg) for arg in node.args)
    return head == "sub" or head == "norm" and bool(names) or is_constant_label(node)


def is_constant_label(node: Node) -> bool:
    """Whether a tree can name a constant only: `AB` (a segment), `AB / CD`, an angle `m A`, `Delta x`, `m + n`."""
    if not isinstance(node, Op):
        return False
    if node.head == "/":
        return all(map(is_constant_label, node.args))
    if node.head == "+":
        return is_letter_sum(node)
    bases = [f.args[0] if isinstance(f, Op) and f.head == "^" and isinstance(f.args[1], Num) else f for f in node.args]
    names = [base.name if isinstance(base, Sym) else "" for base in bases]
    measure = len(names) == 2 and (names[0] == "m" and names[1].startswith("\\angle") or names[0] == "\\Delta")
    return node.head == "*" and (measure or all(name[:1].isupper() for name in names))


def is_letter_sum(node: Node) -> bool:
    """`m + n`, `a + 5b - c`: a sum of different letters with whole factors."""
    if not isinstance(node, Op) or node.head != "+":
        return False
    seen: list[Node] = []
    for term in node.args:
        term = term.args[0] if isinstance(term, Op) and term.head == "neg" else term
        if isinstance(term, Op) and term.head == "*" and len(term.args) == 2 and isinstance(term.args[0], Num):
            term = term.args[1]
        is_letter = isinstance(term, Sym) or isinstance(term, Op) and (term.head == "sub" or is_constant_label(term))
        if not is_letter or term in seen:
            return False
        seen.append(term)
    return True


def same_label(a: Node, b: Node) -> bool:
    """Whether two labels name the same: y and y(x); y and f(x)."""
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Sym) and isinstance(y, Op) and y.head == "call" and isinstance(y.args[-1], Sym):
            if y.args[0] == x or x.name == "y" and y.args[0] in map(Sym, FUNCTION_LETTERS):
                return True
    return a == b


def same_function(a: Node, b: Node) -> dict[str, Node] | None:
    """The renaming of arguments that turns label `b` into label `a`: f(t) into f(x)."""
    if not all(isinstance(n, Op) and n.head == "call" and len(n.args) > 1 for n in (a, b)):
        return None
    if len(a.args) != len(b.args):
        return None
    if a.args[0] != b.args[0] or not all(isinstance(x, Sym) and x.name.islower() for n in (a, b) for x in n.args[1:]):
        return None  # P(A) is not P(B)
    return {y.name: x for x, y in zip(a.args[1:], b.args[1:])}


def negative_base(node) -> bool:
    """Whether a negative number is raised to a power with symbols, as in `(-1)^n`."""
    if not isinstance(node, Op):
        return False
    if node.head == "^" and isinstance(node.args[0], Op) and node.args[0].head == "neg" and symbols(node.args[1]):
        return not symbols(node.args[0])
    return any(map(negative_base, node.args))


def letter_quantity(node: Node) -> Quantity | None:
    """`5m`, `5 m^2`, `5 m/s` with its unit: a numeral times letters that are units; None for all else."""
    found = numeral_and_letters(node)
    return Quantity(found[0], product(found[1])) if found and found[1] else None


def numeral_and_letters(node: Node) -> tuple[Num, list[tuple[str, int]]] | None:
    """The numeral and the unit letters, with their powers, of a product or quotient of nothing else."""
    if isinstance(node, Num):
        return node, []
    if not isinstance(node, Op) or node.head not in ("*", "/"):
        return None
    found = numeral_and_letters(node.args[0])
    if found is None or node.head == "/" and not found[1]:  # 8/m is no 8
        return None
    value, powers = found
    for letter in node.args[1:]:
        power = Num(Fraction(1))
        if isinstance(letter, Op) and letter.head == "^":
            letter, power = letter.args
        if (
            not isinstance(letter, Sym)
            or letter.name not in SINGLE_LETTERS
            or not isinstance(power, Num)
            or (power.value.denominator != 1 or not 0 < power.value < 5)
        ):
            return None
        powers = [*powers, (letter.name, int(power.value) * (-1 if node.head == "/" else 1))]
    return value, powers
