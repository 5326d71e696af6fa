"""Whether two expressions are equal: exactly where both are rational, else by many digits.

Rational values are compared as fractions. Other values are computed twice, the second time with twice the digits:
equal expressions come closer together as the digits grow, different ones do not. So there is no absolute tolerance,
and 1/2^99 is not 1/2^98. Expressions with symbols are compared at fixed pseudo-random points.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import comb, factorial, gcd, isqrt, lcm
from typing import Any

from gspo.rewards.expressions import Expr, UnreadableError

MAX_BITS = 200_000  # of an exact value
MAX_EXPONENT_BITS = 100_000.0  # |log2| of an approximate value
BASE_DIGITS = 60
MAX_DIGITS = 4000
NUM_POINTS = 5
#: A decimal with at least this many significant digits may stand for a value that has no finite decimal.
LONG_DECIMAL = 10


class TooLargeError(ValueError):
    """Evaluating would build a number beyond the size limits; nothing was built."""


def exact(expr: Expr) -> Fraction | None:
    """The rational value; None if it is irrational, symbolic or undefined.

    Raises:
        TooLargeError: a power or factorial beyond ``MAX_BITS``.
    """
    if expr.op == "num":
        return expr.value
    if expr.op in ("sym", "const"):
        return None
    values = [exact(arg) for arg in expr.args]
    if any(value is None for value in values):
        return None
    return _exact_operation(expr, [value for value in values if value is not None])


def _exact_operation(expr: Expr, values: list[Fraction]) -> Fraction | None:
    first, last = values[0], values[-1]
    match expr.op:
        case "add":
            return sum(values, Fraction(0))
        case "neg":
            return -first
        case "mul":
            return first * last
        case "div":
            return first / last if last else None
        case "percent":
            return first / 100
        case "pow":
            return _exact_power(first, last)
        case "factorial":
            return _exact_factorial(first)
        case "call":
            return _exact_call(expr.name, values)
    return None


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        root = _exact_root(base, exponent.denominator) if exponent.denominator <= 64 else None
        return None if root is None else _exact_power(root, Fraction(exponent.numerator))
    power = exponent.numerator
    if base in (0, 1, -1):
        return (base if power % 2 else base * base) if base or power > 0 else (Fraction(1) if power == 0 else None)
    if abs(power) * _bits(base) > MAX_BITS:
        raise TooLargeError("a power has too many digits to be written out")
    return base**power


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    if value < 0 or degree < 2:
        return None
    top, bottom = _integer_root(value.numerator, degree), _integer_root(value.denominator, degree)
    return Fraction(top, bottom) if top is not None and bottom is not None else None


def _integer_root(value: int, degree: int) -> int | None:
    if degree == 2:
        root = isqrt(value)
        return root if root * root == value else None
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low if low**degree == value else None


def _exact_factorial(value: Fraction) -> Fraction | None:
    if value.denominator != 1 or value < 0:
        return None
    if value > 10_000:
        raise TooLargeError("a factorial has too many digits to be written out")
    return Fraction(factorial(value.numerator))


def _exact_call(name: str, values: list[Fraction]) -> Fraction | None:
    first, last = values[0], values[-1]
    integers = [value.numerator for value in values if value.denominator == 1]
    match name:
        case "abs":
            return abs(first)
        case "floor":
            return Fraction(first.numerator // first.denominator)
        case "ceil":
            return Fraction(-(-first.numerator // first.denominator))
        case "min" | "max":
            return (min if name == "min" else max)(values)
        case "root" if last.denominator == 1 and 2 <= last <= 64:
            return _exact_root(first, last.numerator)
        case "sqrt":
            return _exact_root(first, 2)
        case "gcd" | "lcm" if len(integers) == len(values):
            return Fraction((gcd if name == "gcd" else lcm)(*integers))
        case "binom" if len(integers) == 2 and 0 <= integers[1] <= integers[0]:
            if integers[0] > 10_000:
                raise TooLargeError("a binomial coefficient has too many digits to be written out")
            return Fraction(comb(*integers))
    return None


def same(gold: Expr, prediction: Expr) -> bool:
    """Whether two expressions are mathematically equal.

    A decimal of at least ``LONG_DECIMAL`` significant digits also stands for a gold value without a finite decimal
    if it is that value, rounded or cut at its last place.

    Raises:
        TooLargeError: one of them is too large to be evaluated.
    """
    if gold == prediction:
        return True
    left, right = exact(gold), exact(prediction)
    if left is not None and right is not None:
        return left == right or _stands_for(prediction, right, gold, left)
    if not _close(gold, prediction):
        return right is not None and not symbols(gold) and _irrational_stands_for(gold, prediction, right)
    return True


def _decimal_places(expr: Expr) -> int | None:
    """Places of a decimal literal that is long enough; None for anything else."""
    literal = expr.args[0] if expr.op == "neg" else expr
    if literal.op != "num" or "." not in literal.text:
        return None
    digits = literal.text.replace(".", "").lstrip("0")
    return len(literal.text.split(".")[1]) if len(digits) >= LONG_DECIMAL else None


def _stands_for(prediction: Expr, value: Fraction, gold: Expr, gold_value: Fraction) -> bool:
    places = _decimal_places(prediction)
    if places is None or _finite_decimal(gold_value):
        return False
    return _rounded_or_cut(abs(gold_value) if gold_value * value >= 0 else -abs(gold_value), abs(value), places)


def _rounded_or_cut(size: Any, decimal: Any, places: int) -> bool:
    """Whether a decimal is a positive value rounded to, or cut at, so many places."""
    difference = (size - decimal) * 10**places
    return bool(2 * difference >= -1 and difference < 1)


def _finite_decimal(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _irrational_stands_for(gold: Expr, prediction: Expr, value: Fraction) -> bool:
    places = _decimal_places(prediction)
    if places is None:
        return False
    import mpmath

    with mpmath.workdps(BASE_DIGITS + places):
        number, decimal = _numeric(gold, {}), mpmath.mpf(value.numerator) / value.denominator
        if mpmath.im(number) != 0 or number * decimal < 0:
            return False
        return _rounded_or_cut(abs(number), abs(decimal), places)


def symbols(expr: Expr) -> frozenset[str]:
    """Names of the free symbols."""
    if expr.op == "sym":
        return frozenset((expr.name,))
    return frozenset().union(*(symbols(arg) for arg in expr.args)) if expr.args else frozenset()


def constant_ratio(gold: Expr, prediction: Expr) -> bool:
    """Whether prediction = c * gold for one constant c other than 0: the same equation ``... = 0``."""
    import mpmath

    names = sorted(symbols(gold) | symbols(prediction))
    ratios = []
    with mpmath.workdps(BASE_DIGITS):
        for point in _points(names):
            pair = _pair(gold, prediction, _substitution(point))
            if pair is None or pair[0] == 0 or pair[1] == 0:
                continue
            ratios.append(pair[1] / pair[0])
        tolerance = mpmath.mpf(10) ** -(BASE_DIGITS // 2)
        return len(ratios) > 1 and all(abs(r - ratios[0]) <= tolerance * abs(ratios[0]) for r in ratios)


def _close(gold: Expr, prediction: Expr) -> bool:
    import mpmath

    digits = BASE_DIGITS + min(MAX_DIGITS, _literal_digits(gold) + _literal_digits(prediction))
    names = sorted(symbols(gold) | symbols(prediction))
    valid = 0
    for point in _points(names) if names else [{}]:
        pairs = []
        for precision in (digits, 2 * digits):
            with mpmath.workdps(precision):
                pairs.append(_pair(gold, prediction, _substitution(point)))
        if pairs[0] is None or pairs[1] is None:
            continue
        if not _approaching(pairs[0], pairs[1], digits):
            return False
        valid += 1
    return valid > 0


def _approaching(coarse: tuple[Any, Any], fine: tuple[Any, Any], digits: int) -> bool:
    import mpmath

    if any(mpmath.isinf(v) for v in fine):
        return bool(fine[0] == fine[1])
    with mpmath.workdps(2 * digits):
        first, second = abs(coarse[0] - coarse[1]), abs(fine[0] - fine[1])
        relative = mpmath.mpf(10) ** -(2 * digits - 20) * max(abs(fine[0]), abs(fine[1]))
        return bool(second <= relative or (first > 0 and second <= first * mpmath.mpf(10) ** -(digits // 2)))


def _pair(gold: Expr, prediction: Expr, values: dict[str, Any]) -> tuple[Any, Any] | None:
    """Both values at a point; None where one is undefined, or not real although a symbol is negative."""
    import mpmath

    try:
        pair = (_numeric(gold, values), _numeric(prediction, values))
    except (ZeroDivisionError, OverflowError, mpmath.libmp.ComplexResult, mpmath.libmp.NoConvergence):
        return None
    except ValueError as error:
        if isinstance(error, (TooLargeError, UnreadableError)):
            raise
        return None  # mpmath: a pole
    if any(mpmath.isnan(v) for v in pair):
        return None
    if any(value < 0 for value in values.values()) and any(mpmath.im(v) != 0 for v in pair):
        return None
    return pair


def _points(names: list[str]) -> Iterator[dict[str, Fraction]]:
    """Fixed points that look random; from the third on with negative coordinates."""
    for index in range(NUM_POINTS if names else 1):
        point = {}
        for name in names:
            digest = hashlib.sha256(f"{index}:{name}".encode()).digest()
            size = Fraction(300 + int.from_bytes(digest[:4], "big") % 2200, 997)
            point[name] = -size if index >= 2 and digest[4] % 2 else size
        yield point


def _substitution(point: dict[str, Fraction]) -> dict[str, Any]:
    import mpmath

    return {name: mpmath.mpf(value.numerator) / value.denominator for name, value in point.items()}


def _literal_digits(expr: Expr) -> int:
    """Digits that the exact parts of an expression take: so much more is needed to tell neighbours apart."""
    value = exact(expr)
    if value is not None:
        return _bits(value) * 3 // 10
    return sum(_literal_digits(arg) for arg in expr.args)


def _numeric(expr: Expr, values: dict[str, Any]) -> Any:
    import mpmath

    if expr.op == "sym":
        return values[expr.name]
    if expr.op == "const":
        return {"pi": +mpmath.pi, "e": +mpmath.e, "i": mpmath.mpc(0, 1), "infinity": mpmath.inf}[expr.name]
    rational = exact(expr)
    if rational is not None:
        return mpmath.mpf(rational.numerator) / rational.denominator
    args = [_numeric(arg, values) for arg in expr.args]
    result = _numeric_operation(expr, args)
    if mpmath.isfinite(result) and result != 0 and abs(mpmath.log(abs(result), 2)) > MAX_EXPONENT_BITS:
        raise TooLargeError("a value is too large or too small to be computed")
    return result


def _numeric_operation(expr: Expr, args: list[Any]) -> Any:
    import mpmath

    first, last = args[0], args[-1]
    match expr.op:
        case "add":
            return mpmath.fsum(args)
        case "neg":
            return -first
        case "mul":
            return first * last
        case "div":
            return first / last
        case "percent":
            return first / 100
        case "degrees":
            return first * mpmath.pi / 180
        case "pow":
            return _numeric_power(first, last)
        case "factorial":
            return _bounded(mpmath.factorial, first)
    return _numeric_call(expr.name, args)


def _bounded(function: Callable[[Any], Any], argument: Any) -> Any:
    if abs(argument) > 60_000:
        raise TooLargeError("a factorial or exponential is too large to be computed")
    return function(argument)


def _numeric_power(base: Any, exponent: Any) -> Any:
    import mpmath

    if base != 0 and mpmath.isfinite(base) and mpmath.isfinite(exponent):
        size = abs(mpmath.log(base)) * abs(exponent) * 1.4427
        if size > MAX_EXPONENT_BITS:
            raise TooLargeError("a power is too large or too small to be computed")
    return base**exponent


def _numeric_call(name: str, args: list[Any]) -> Any:
    import mpmath

    first, last = args[0], args[-1]
    if name == "root":
        return _real_root(first, last)
    if name == "log":
        return mpmath.log(first, last) if len(args) == 2 else mpmath.log(first)
    if name == "exp":
        return _bounded(mpmath.exp, first)
    if name in ("sinh", "cosh", "tanh"):
        return _bounded(getattr(mpmath, name), first)
    if name in ("min", "max"):
        return (min if name == "min" else max)(args)
    if name == "binom":
        if max(abs(a) for a in args) > 60_000:
            raise TooLargeError("a binomial coefficient is too large to be computed")
        return mpmath.binomial(first, last)
    plain = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "abs": "fabs"}.get(name, name)
    if plain in {
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "asin",
        "acos",
        "atan",
        "ln",
        "sqrt",
        "fabs",
        "floor",
        "ceil",
    }:
        return getattr(mpmath, plain)(first)
    raise UnreadableError(f"no value is known for {name} here")


def _real_root(value: Any, degree: Any) -> Any:
    """The real root of a negative number for an odd degree, else the principal one."""
    import mpmath

    if mpmath.im(value) == 0 and mpmath.im(degree) == 0 and degree == int(degree) and int(degree) % 2 and value < 0:
        return -((-value) ** (1 / degree))
    return value ** (1 / degree)
