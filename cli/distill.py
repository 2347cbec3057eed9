"""`flwr-distill distill` and `audit`: condense images on this machine, and attack the result."""

from rich.console import Console

from flwr_distill.cli.distill_options import AuditOptions, DistillOptions
from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import with_options


@with_options("options", DistillOptions)
def distill(options: DistillOptions) -> None:
    """Distil a set of images into a few virtual ones, and measure how good they are.

    SOURCE is a named data set (digits, mnist, cifar10 ...), images by class, or an .npz with the
    arrays images (uint8) and labels. Images by class are a folder with one folder per class
    (./digits is a folder, digits a name), a folder with a list, a WebDataset or Parquet files.

    Writes virtual.safetensors, a picture of the images (virtual.png) and summary.json to OUTPUT.

    Methods: dm (distribution matching) is for images from 16 pixels a side, and for smaller ones of
    few classes. kip (kernel inducing points) is better and faster for smaller ones of most classes.
    kip-negatives is for smaller ones of a single class, which kip cannot learn. auto chooses.

    With --formation 2, a virtual image contains 2 x 2 smaller ones: four times as many training
    images in the same bytes.

    A table compares networks trained on the virtual images, on as many random real ones, and on
    all, with the same start and steps. The quick judge is the data set's default network (500 steps
    of Adam, batches of at most 64). The full panel adds the papers' ConvNet (1,000 steps of SGD),
    LeNet, an MLP and a ResNet-8 (3,000 of Adam), as far as the images' shape fits. Their training
    images are changed at random (train.augment="auto"). The test images are the data set's test
    part, or a held-back fifth of each class of a folder or npz.

    The privacy card shows the distance of virtual images to their source images and to held-back
    ones.
    """
    from flwr_distill.cli.distillation import REFUSALS, condense  # here: imports torch

    with exit_on(*REFUSALS, command="distill"):
        condense(options, Console())


@with_options("options", AuditOptions)
def audit(options: AuditOptions) -> None:
    """Measure what virtual data of your images would reveal about single images.

    SOURCE is as for flwr-distill distill. Random halves of the images are distilled. An attacker
    then guesses the half of each image, with the other halves as examples (LiRA). The attacker
    knows all the images, the method and the seed. A real receiver of your virtual data knows less,
    and finds fewer. Nothing leaves this machine.

    More sets make the attack stronger and the numbers more certain. An attack that finds nothing
    proves nothing; differential privacy is a proof (hfldd.dp-epsilon).
    """
    from flwr_distill.cli.distillation import REFUSALS, report_attacks

    with exit_on(*REFUSALS, command="audit"):
        report_attacks(options, Console())
