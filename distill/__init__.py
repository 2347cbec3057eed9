"""The maths of distillation: virtual data and ensembles; independent of Flower and nodes."""

from distill.auto import distill_auto
from distill.distribution_matching import distill_dm
from distill.errors import DistillError, VirtualDataError
from distill.kip import distill_kip
from distill.registry import Distiller, distiller, distiller_names, register
from distill.virtual_data import VirtualData

__all__ = [
    "DistillError",
    "Distiller",
    "VirtualData",
    "VirtualDataError",
    "distill_auto",
    "distill_dm",
    "distill_kip",
    "distiller",
    "distiller_names",
    "register",
]
