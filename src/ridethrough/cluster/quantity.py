"""Kubernetes quantities ("1800Gi", "500m", "2e3") as exact numbers, and back.

Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import re
from fractions import Fraction

GIB = 1 << 30

_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?\d+)?")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


class QuantityError(ValueError):
    """Not a quantity; the message is one line with what was expected."""


def parse_quantity(value: str | int | float) -> Fraction:
    """The exact value of a quantity: bytes, cores or counts. Raises QuantityError."""
    match = _FORM.fullmatch(str(value))
    if match is None:
        raise QuantityError(f"{value!r} is no quantity: give a number with a suffix such as Gi, G, Mi, k or m")
    number, suffix = Fraction(match[1]), match[2] or ""
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    if suffix in _DECIMAL:
        return number * Fraction(10) ** _DECIMAL[suffix]
    return number * Fraction(10) ** int(suffix[1:])
