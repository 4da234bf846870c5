"""Stage 4 of the answer checker, first third: sets of real numbers.

An interval and the inequality that it solves to are equal. A set is a list of pieces (low, low closed, high, high
closed) whose ends are trees, None for an infinity. `RealLine.real_set` reads one from an interval, a union, a finite
set, an inequality (linear or quadratic in one symbol, or of an absolute value) or a chain of them; unions,
complements and intersections are computed where the ends are constants, which can be ordered.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cmp_to_key

from nano_exgrpo.checker import tree
from nano_exgrpo.checker.evaluator import Evaluator, close
from nano_exgrpo.checker.functions import Undefined
from nano_exgrpo.checker.tree import Node, Num, Op, Rel, Seq, Sym

MAX_PIECES = 64

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}

POLYNOMIAL = {"+", "*", "/", "^", "neg", "percent", "mixed"}  # where five values tell a quadratic polynomial

Piece = tuple[Node | None, bool, Node | None, bool]


class RealLine:
    """Reads and combines sets of reals; `budget` is the work left to this verdict (see `values`)."""

    def __init__(self, budget: list[int]):
        self.budget = budget

    def is_real_set(self, node: Node) -> bool:
        """Whether a tree can only be a set of reals (a pair in parentheses may also be a point)."""
        if isinstance(node, Op):
            return node.head in ("cup", "cap", "setminus", "reals")
        if isinstance(node, Rel):
            return bool(set(node.ops) & (tree.INEQUALITIES | {"in"}))
        if isinstance(node, Seq):
            if node.kind == "tuple":
                return len(node.items) == 2 and (node.ends != "()" or any(tree.infinity(item) for item in node.items))
            return len(node.items) > 1 and all(self.is_real_set(item) for item in node.items)
        return False

    def real_set(self, node: Node) -> tuple[str | None, list[Piece]] | None:
        """(variable, pieces) of an interval, union, inequality, ...; None for anything else."""
        if isinstance(node, Op):
            if node.head == "reals":
                return None, [(None, False, None, False)]
            if node.head == "+" and isinstance(node.args[1], Op) and node.args[1].head == "neg" and not node.args[2:]:
                node = Op("setminus", (node.args[0], node.args[1].args[0]))  # R - {1}
            if node.head not in ("cup", "cap", "setminus"):
                return None
            parts = [self.real_set(arg) or self.point(arg) for arg in node.args]
            if None in parts:
                return None
            (variable, left), (_, right) = parts
            if node.head == "cup":
                return variable, self.union(left + right)
            right = right if node.head == "cap" else self.complement(right)
            return variable, self.intersection(left, right)
        if isinstance(node, Rel):
            return self.solution(node)
        if not isinstance(node, Seq):
            return None
        if node.kind == "tuple":
            if len(node.items) != 2 or not all(isinstance(item, Num | Sym | Op) for item in node.items):
                return None
            low, high = node.items
            if tree.infinity(low) > 0 or tree.infinity(high) < 0:
                return None
            low, high = (None if tree.infinity(end) else end for end in (low, high))
            return None, [(low, node.ends[0] == "[", high, node.ends[1] == "]")]
        if len(node.items) > MAX_PIECES:
            return None
        if node.kind == "set":
            if not all(isinstance(item, Num | Sym | Op) for item in node.items):
                return None
            return None, self.union([(item, True, item, True) for item in node.items])
        parts = [
            self.real_set(item) if isinstance(item, Rel) or self.is_real_set(item) else None for item in node.items
        ]
        if None in parts:
            return None
        variable = next((v for v, _ in parts if v), None)
        if node.kind == "list" and all(isinstance(item, Rel) for item in node.items):
            both = parts[0][1]
            for _, pieces in parts[1:]:
                both = self.intersection(both, pieces)
            if both:
                return variable, both
        return variable, self.union([piece for _, pieces in parts for piece in pieces])

    def finite(self, node: Node) -> tuple[None, list[Piece]] | None:
        """The set of a constant, or of those in a list."""
        items = node.items if isinstance(node, Seq) and node.kind in ("list", "set") else [node]
        if not all(map(tree.is_constant, items)) or len(items) > MAX_PIECES:
            return None
        return None, self.union([(item, True, item, True) for item in items])

    def point(self, node: Node) -> tuple[None, list[Piece]] | None:
        """The set of one number, written `{1}` without backslashes or as `except 1`."""
        return (None, [(node, True, node, True)]) if tree.is_constant(node) else None

    def solution(self, rel: Rel) -> tuple[str | None, list[Piece]] | None:
        """The solution set of `x > 2`, `0 < x <= 3`, `|x| >= 5`, `2x + 1 < 5`, `x != 1`, `x in (0, 1)`, `x = 3`."""
        terms, ops = rel.terms, rel.ops
        if ops == ["in"]:
            found = self.real_set(terms[1])
            return found and (str(terms[0]), found[1])
        if not set(ops) <= tree.INEQUALITIES | {"="}:
            return None
        if len(terms) == 2:
            left, right, op = terms[0], terms[1], ops[0]
            if tree.is_label(right) and not tree.is_label(left) or not tree.symbols(left):
                left, right, op = right, left, FLIPPED[op]
            if (bars := self.alone(left, right)) is not None and bars != left:  # 2|x + 4| - 6 < 0
                isolated = self.isolate(*(tree.replaced(side, bars, Sym("|")) for side in (left, right)))
                return isolated and self.solution(Rel([bars, isolated[1]], [FLIPPED[op] if isolated[2] else op]))
            if isinstance(left, Op) and left.head == "abs" and tree.symbols(left):
                inner, minus = left.args[0], Op("neg", (right,))
                if op in ("<", "<="):
                    return self.solution(Rel([minus, inner, right], [op, op]))
                halves = self.solution(Rel([inner, minus], [FLIPPED[op]])), self.solution(Rel([inner, right], [op]))
                if None in halves or op in ("=", "!="):
                    return None
                return halves[0][0], self.union(halves[0][1] + halves[1][1])
            solved = self.isolate(left, right)
            if solved is None:
                return self.quadratic(left, op, right)
            variable, bound, flips = solved
            op = FLIPPED[op] if flips else op
            if tree.infinity(bound):
                bound = None
            return variable, {
                "<": [(None, False, bound, False)],
                "<=": [(None, False, bound, True)],
                ">": [(bound, False, None, False)],
                ">=": [(bound, True, None, False)],
                "=": [(bound, True, bound, True)],
                "!=": [(None, False, bound, False), (bound, False, None, False)],
            }[op]
        if len(terms) == 3 and "=" not in ops and "!=" not in ops and ops[0][0] == ops[1][0]:
            low, middle, high = terms
            halves = self.solution(Rel([middle, low], [FLIPPED[ops[0]]])), self.solution(Rel([middle, high], ops[1:]))
            if None in halves:
                return None
            (variable, left), (_, right) = halves
            if len(left) == len(right) == 1:  # two half-lines, whose ends may be symbols
                first, second = left[0], right[0]
                if first[2] is not None:
                    first, second = second, first
                if first[2] is second[0] is None and first[0] is not None and second[2] is not None:
                    return variable, [(first[0], first[1], second[2], second[3])]
            return variable, self.intersection(left, right)  # 1 < x^2 < 9
        return None

    def alone(self, left: Node, right: Node) -> Op | None:
        """The only absolute value in an inequality, if no symbol stands outside of it."""
        found = [node for side in (left, right) for node in tree.absolute_values(side)]
        if len(found) != 1 or tree.symbols(right) or tree.symbols(tree.replaced(left, found[0], Num(Fraction(0)))):
            return None
        return found[0] if tree.symbols(found[0]) else None

    def isolate(self, left: Node, right: Node) -> tuple[str, Node, bool] | None:
        """(x, c, whether the relation turns) for `left op right` as `x op c`; None if not linear in one symbol."""
        if tree.is_label(left) and not (tree.symbols(left) & tree.symbols(right)):
            return str(left), right, False
        found = self.polynomial(left, right)
        if found is None or found[1] != 0:
            return None
        name, _, slope, zero = found
        return (str(Sym(name)), Num(-zero / slope), slope < 0) if slope else None

    def polynomial(self, left: Node, right: Node) -> tuple[str, Fraction, Fraction, Fraction] | None:
        """(x, a, b, c) if left - right is a x^2 + b x + c with rational numbers a, b, c; None if it is not."""
        names = tree.symbols(left) | tree.symbols(right)
        if len(names) != 1 or not isinstance(left, Num | Sym | Op) or not isinstance(right, Num | Sym | Op):
            return None
        name = next(iter(names))
        if not (tree.contents(left)[1] | tree.contents(right)[1]) <= POLYNOMIAL:
            return None
        difference = Op("+", (left, Op("neg", (right,))))
        try:
            values = [
                Evaluator(0, False, self.budget, env={name: Fraction(x)}).value(difference) for x in (0, 1, 2, 5, -3)
            ]
        except Undefined:
            return None
        if not all(isinstance(value, Fraction) for value in values):
            return None
        c, one, two, *others = values
        a = (two - 2 * one + c) / 2
        b = one - a - c
        return (name, a, b, c) if others == [a * x * x + b * x + c for x in (5, -3)] else None

    def quadratic(self, left: Node, op: str, right: Node) -> tuple[str, list[Piece]] | None:
        """The solution set of a quadratic inequality: `x^2 < 9`."""
        found = self.polynomial(left, right)
        if found is None or found[1] == 0 or op == "=":
            return None
        name, a, b, c = found
        name, op = str(Sym(name)), op if a > 0 else FLIPPED[op]
        discriminant = b * b - 4 * a * c
        if discriminant < 0:
            return name, [(None, False, None, False)] if op in (">", ">=", "!=") else []
        root = Op("sqrt", (Num(discriminant / (4 * a * a)),))
        low, high = (Op("+", (Num(-b / (2 * a)), end)) for end in (Op("neg", (root,)), root))
        closed = op in ("<=", ">=")
        if op in ("<", "<="):
            return name, [(low, closed, high, closed)] if discriminant or closed else []
        if op == "!=":
            return name, self.complement([(low, True, low, True), (high, True, high, True)])
        return name, self.union([(None, False, low, closed), (high, closed, None, False)])

    def order(self, a: Node, b: Node) -> int:
        """-1, 0 or 1 as a < b, a = b, a > b.

        Raises:
            Undefined: one of them is not a real constant.
        """
        if tree.symbols(a) or tree.symbols(b):
            if a == b:
                return 0
            raise Undefined("ends of intervals with symbols cannot be ordered")
        at = Evaluator(0, False, self.budget)
        x, y = at.real(at.value(a)), at.real(at.value(b))
        if close(at, x, y):
            return 0
        return -1 if at.num(x) < at.num(y) else 1

    def union(self, pieces: list[Piece]) -> list[Piece]:
        """Disjoint pieces in order."""
        if len(pieces) > 2 * MAX_PIECES:
            raise Undefined("too many intervals")
        if len(pieces) < 2:
            return pieces

        def by_low(p, q) -> int:
            if p[0] is None or q[0] is None:
                return (q[0] is None) - (p[0] is None)
            return self.order(p[0], q[0]) or q[1] - p[1]

        out: list = []
        for piece in sorted(pieces, key=cmp_to_key(by_low)):
            if out and self.touches(out[-1], piece):
                low, low_closed, high, high_closed = out[-1]
                if high is not None and (piece[2] is None or self.order(high, piece[2]) < 0):
                    high, high_closed = piece[2], piece[3]
                elif high is not None and self.order(high, piece[2]) == 0:
                    high_closed = high_closed or piece[3]
                out[-1] = (low, low_closed, high, high_closed)
            else:
                out.append(piece)
        return out

    def touches(self, p: Piece, q: Piece) -> bool:
        """Whether q, which starts no earlier than p, continues it without a gap."""
        if p[2] is None or q[0] is None:
            return True
        order = self.order(p[2], q[0])
        return order > 0 or order == 0 and (p[3] or q[1])

    def complement(self, pieces: list[Piece]) -> list[Piece]:
        out, low, closed, open_end = [], None, False, True
        for piece in self.union(pieces):
            if piece[0] is not None:
                out.append((low, closed, piece[0], not piece[1]))
            low, closed = piece[2], not piece[3]
            open_end = piece[2] is not None
        return out + [(low, closed, None, False)] if open_end else out

    def intersection(self, left: list[Piece], right: list[Piece]) -> list[Piece]:
        pieces = self.complement(self.complement(left) + self.complement(right))
        return [p for p in pieces if p[0] is None or p[2] is None or self.order(p[0], p[2]) < 0 or p[1] and p[3]]
