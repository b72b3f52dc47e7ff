"""The shape of a vision transformer (ViT): an encoder of image patches.

    image  - patches p x p -  3 p^2 x h -+
    class token                         -+- + position - [ layers, no mask ] - norm - h x classes

    tokens of an image    (side / p)^2 + 1
    parameters            12 h^2 a layer + (3 p^2 + tokens + classes) h: ViT-B/16 has 86,567,656

Only the class token passes through the head, so its products are divided over all tokens. Before a
decoder (LLaVA, Gemma 3) a ViT has no head: its tokens pass through a projector into the decoder.
Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021, section 3.1 and table 1; Radford et
al., CLIP, 2021, section 2.4; Zhai et al., SigLIP, 2023; Liu et al., LLaVA-1.5, 2023, section 3.
"""

from dataclasses import dataclass
from functools import cached_property

from labkit.scale.bert_shapes import Encoder


@dataclass(frozen=True)
class ViT(Encoder):
    """The numbers of a ViT's configuration. The defaults are those of ViT-B/16.

    vocab: 1, the class token, which is the only learned input vector. image, patch: their sides in
    pixels. channels: of a pixel. classes: 0 if there is no head.
    """

    vocab: int = 1
    positions: int = 197
    pooler: bool = False
    image: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000

    def __post_init__(self):
        super().__post_init__()
        if self.patch < 1 or self.image % self.patch:
            raise ValueError(f"patch={self.patch} must divide image={self.image}")

    @cached_property
    def patch_weights(self):
        """Weights of the product that turns a patch into a vector."""
        return self.channels * self.patch**2 * self.hidden

    @cached_property
    def input_parameters(self):
        """Parameters of patches and positions; the class token is the embedding."""
        return self.patch_weights + self.hidden + self.positions * self.hidden

    @cached_property
    def head_parameters(self):
        """Parameters of the last norm and the classes."""
        return 2 * self.hidden + self.classes * (self.hidden + 1)

    @cached_property
    def head_weights(self):
        """Weights per token of the patches and of the head, which only the class token meets."""
        return self.patch_weights + self.classes * self.hidden / self.positions


@dataclass(frozen=True)
class ImageEncoder(ViT):
    """A ViT before a decoder. class_token: True for CLIP, which also has a norm behind the patches.

    SigLIP has neither, but a bias in the patches. tokens: of an image in the decoder's sequence.
    projector: its parameters, all of them in matrices that each of these tokens meets.
    """

    classes: int = 0
    class_token: bool = True
    tokens: int = 196
    projector: int = 0

    @cached_property
    def embedding_parameters(self):
        """Parameters of the class token."""
        return self.class_token * self.hidden

    @cached_property
    def input_parameters(self):
        """Parameters of patches, positions, and CLIP's norm or SigLIP's bias."""
        return self.patch_weights + (1 + self.class_token + self.positions) * self.hidden

    def image_flops(self):
        """Forward FLOPs of an image, without the projector."""
        return self.positions * self.forward_flops(self.positions)


def tokens_of_image(image, patch):
    """Return the tokens of one image: its patches and the class token."""
    return (image // patch) ** 2 + 1
