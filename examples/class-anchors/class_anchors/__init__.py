"""Class anchors: nodes keep the features of a class near the federation's mean of it."""
