"""The maths of distillation: virtual data and ensembles; independent of Flower and nodes."""

from flwr_distill.distill.auto import distill_auto
from flwr_distill.distill.distribution_matching import distill_dm
from flwr_distill.distill.errors import DistillError, VirtualDataError
from flwr_distill.distill.kip import distill_kip
from flwr_distill.distill.registry import Distiller, distiller, distiller_names, register
from flwr_distill.distill.virtual_data import VirtualData

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
