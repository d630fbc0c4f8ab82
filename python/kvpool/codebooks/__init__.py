"""VecInfer's codebooks: kept in files, found for a model; what makes them is in ``calibration``."""

from .file import codebook_sets, find_codebooks, load_codebooks, save_codebooks, shipped_codebooks
from .fingerprint import Fingerprint, fingerprint_of

__all__ = [
    "Fingerprint",
    "codebook_sets",
    "find_codebooks",
    "fingerprint_of",
    "load_codebooks",
    "save_codebooks",
    "shipped_codebooks",
]
