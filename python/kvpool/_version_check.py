"""Whether the MLX at hand is the one that the extension was built against."""

from __future__ import annotations

from pathlib import Path


def require_matching_mlx() -> None:
    """Raises ImportError if MLX is missing or differs from the one built against.

    MLX's C++ interface changes between releases, so that another one would fail later and in
    stranger ways.
    """
    try:
        import mlx.core as mx
    except ImportError as error:
        raise ImportError(
            f"kvpool needs MLX, which cannot be imported ({error}). On Linux it needs exactly one "
            "backend beside it: pip install 'mlx[cpu]' or 'mlx[cuda13]'."
        ) from error
    record = Path(__file__).parent / "_mlx_version.txt"
    if not record.exists():
        raise ImportError(f"kvpool's extension is not built in {record.parent}: pip install the checkout, or run make build")
    built_against = record.read_text().strip()
    installed = mx.__version__
    if installed != built_against:
        raise ImportError(
            f"kvpool was built against MLX {built_against}, and MLX {installed} is installed. "
            f"Install that one (pip install 'mlx=={built_against}', on Linux 'mlx[cpu]=={built_against}' or "
            f"'mlx[cuda13]=={built_against}'), or build kvpool anew."
        )
