"""The maths of distillation: virtual data and ensembles; knows nothing of Flower or nodes."""
