"""Where does each position look? Every mixer's matrix [h t s] on one test row."""

from dataclasses import replace

import torch

from analysis.base import NotApplicableError, Subject, describe, draw
from analysis.links import find_links, find_offsets
from analysis.matrices.layer_matrix import LayerMatrix
from analysis.matrices.views import view_crop, view_whole
from analysis.mixing import collect_mixers
from lab.laws import MatrixMixer

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "What each layer mixes, on the first test row"


@torch.no_grad()
def measure(subject: Subject) -> list[LayerMatrix]:
    """Return each mixer's matrix on the subject's first row, and a crop of each large one.

    Raises:
        NotApplicableError: for a model without mixers.
    """
    batch = subject.batch[:1]
    offsets, findings = find_offsets(subject), []
    for mixer in collect_mixers(subject.model, batch):
        read, written = offsets.get(mixer.layer)
        links = replace(find_links(batch), read=read, written=written)
        offered = isinstance(mixer.module, MatrixMixer)
        picture, mass = view_whole(mixer, links) if offered else (None, None)
        whole = LayerMatrix(
            layer=mixer.layer,
            mixer=mixer.kind,
            form=mixer.form,
            picture=picture,
            mass=mass,
            cropped=False,
            links=links,
            tokens=batch.inputs[0].cpu().numpy(),
            roles=batch.roles[0].cpu().numpy(),
            role_names=subject.task.role_names,
        )
        findings.append(whole)
        if picture is not None and picture.pool > 1:
            crop = view_crop(mixer, picture, links)
            findings.append(replace(whole, picture=crop, cropped=True))
    if not findings:
        raise NotApplicableError("no block has a sequence mixer")
    return findings
