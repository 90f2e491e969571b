"""A public module's weights by our names."""

from torch import Tensor, nn

from lab.layers.ssd import SSD


def mamba2_weights(theirs: nn.Module, ours: SSD) -> dict[str, Tensor]:
    """Return the weights of a transformers Mamba2Mixer by the names of our layer of its sizes.

    One projection of theirs makes gate, x, B, C and dt, side by side.
    """
    widths = [
        linear.out_features
        for linear in (ours.x_proj, ours.x_proj, ours.B_proj, ours.C_proj, ours.dt_proj)
    ]
    parts = theirs.get_parameter("in_proj.weight").split(widths)
    weights = {
        f"{name}_proj.weight": part
        for name, part in zip(("z", "x", "B", "C", "dt"), parts, strict=True)
    }
    same = {
        "dt_proj.bias": "dt_bias",
        "A_log": "A_log",
        "D": "D",
        "conv.bias": "conv1d.bias",
        "norm_weight": "norm.weight",
        "out_proj.weight": "out_proj.weight",
    }
    weights |= {name: theirs.get_parameter(their) for name, their in same.items()}
    return weights | {"conv.weight": theirs.get_parameter("conv1d.weight").squeeze(1)}
