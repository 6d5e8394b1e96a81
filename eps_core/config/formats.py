"""In what K and V may lie, by what --kv-bits calls it: the one place that says a format's codes, scales and bytes. How
numbers become codes and codes numbers: `reference.codes`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eps_core.errors import require, shown

FormatName = int | str
KvFormats = tuple[FormatName, FormatName]  # of K and of V

AS_THEY_ARE = 16  # K or V in the cache's dtype
READ_BITS = {16, 8, 4}  # of K and of V: as they are, and the codes that kernels read
WEIGHT_BITS = {"full": None, "8bit": 8, "4bit": 4}  # of a weight in decode steps, by what --weights calls it
LEAST = 2.0**-126  # a row whose numbers are all below it has the scale 0: GPUs flush such numbers to 0
SCALE_BYTES = 2  # float16, one for the codes of each (token, kv head)


@dataclass(frozen=True)
class Format:
    """Codes of a row, the D elements of a token and kv head, and its scale."""

    words: str  # what tables call it
    code_bits: int
    code_dtype: str  # in which the bytes of codes lie
    most: int  # the largest number of a row that codes can say, in scales
    block: int = 0  # elements that also share a scale of one byte; 0: none
    multiple: int = 1  # head dims must be one of it ..
    because: str = ""  # .. since it does this
    instead: str = ""

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of a row's codes, with the scales of its blocks."""
        return head_dim * self.code_bits // 8 + (head_dim // self.block if self.block else 0)

    def row_bytes(self, head_dim: int) -> int:
        """The same with the row's scale."""
        return self.code_bytes(head_dim) + SCALE_BYTES


FORMATS: dict[FormatName, Format] = {
    8: Format("int8", 8, "int8", 127),
    "fp8": Format("fp8", 8, "uint8", 448),
    4: Format("int4", 4, "uint8", 7, multiple=2, because="packs two codes a byte", instead="8"),
    "nvfp4": Format(
        "nvfp4", 4, "uint8", 6 * 448, block=16, multiple=16, because="gives 16 dimensions a scale", instead="fp8"
    ),
}
KV_BITS: tuple[FormatName, ...] = (AS_THEY_ARE, *FORMATS)
EXACT: KvFormats = (AS_THEY_ARE, AS_THEY_ARE)


def formats_of(kv_bits: Any) -> KvFormats:
    """Return the formats of K and of V, given as one name for both or as two: 8, (8, "fp8") or the text "8,fp8". Raises
    ConfigError for all else."""
    named: dict[str, FormatName] = {str(bits): bits for bits in KV_BITS}
    parts = kv_bits.split(",") if isinstance(kv_bits, str) else kv_bits
    found = [named.get(str(one).strip()) for one in (parts if isinstance(parts, tuple | list) else [parts])]
    require(
        None not in found and len(found) in (1, 2),
        f"kv-bits {shown(kv_bits)} is not one of {', '.join(named)}, nor two of them for K and V, such as 8,4",
    )
    return found[0], found[-1]  # type: ignore[return-value]


def fault(name: FormatName, head_dim: int) -> str | None:
    """Return why heads of `head_dim` cannot lie in a format, and the fix; None: they can."""
    if name not in KV_BITS:
        return f"kv-bits {shown(name)} is not one of {', '.join(map(str, KV_BITS))}: use 8"
    form = FORMATS.get(name)
    if form is None or head_dim % form.multiple == 0:
        return None
    wrong = "is odd" if form.multiple == 2 else f"is no multiple of {form.multiple}"
    return f"kv-bits {name} {form.because}, and head dim {head_dim} {wrong}: use --kv-bits {form.instead}"


def formats_for(head_dim: int) -> list[FormatName]:
    """Those of KV_BITS that heads of `head_dim` can have."""
    return [name for name in KV_BITS if fault(name, head_dim) is None]


def as_given(kv_bits: Iterable[FormatName]) -> str:
    """As `--kv-bits` takes them: `8`, or those of K and of V where they differ: `8,4`."""
    return ",".join(map(str, dict.fromkeys(kv_bits)))


def words(name: FormatName, dtype: str) -> str:
    """Return the name in tables of K or V of a cache of this dtype."""
    return FORMATS[name].words if name in FORMATS else dtype


def described(dtype: str, kv_bits: KvFormats) -> str:
    """Return the formats of K and V of a cache, in a word or two."""
    k, v = (words(name, dtype) for name in kv_bits)
    return k if k == v else f"K {k}, V {v}"


def outcome_label(reads: str, dtype: str, kv_bits: KvFormats) -> str:
    """Return the name of a column of results: what reads the cache (dense, EPS, a policy), and in what K and V lie
    where they are codes."""
    return reads if kv_bits == EXACT else f"{reads}, {described(dtype, kv_bits)}"
