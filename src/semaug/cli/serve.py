"""`semaug serve`: try a trained model in the browser, or use it from programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from semaug.cli.common import Command, choose_device, say
from semaug.isda.precision import LARGEST_STRENGTH
from semaug.util.errors import MissingPackageError
from semaug.util.ranges import CountOrZero, Range, Seed, setting


@dataclass(frozen=True)
class Serve(Command):
    """Try a trained model in the browser: drop an image, see its classes and the nearest training images.

    A slider moves the image's feature along directions of the augmentation, and shows how the nearest images change.
    Programs send images to /predict and get JSON; /api describes how. By default the server is for this machine only.
    Needs pip install '.[serve]' and, for the page, the training images.
    """

    ends_at_once: ClassVar[bool] = True

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory. For the API alone, also an exported folder or its model.onnx."""
    host: str = setting("127.0.0.1", "main")
    """The address to listen on. Anyone who can reach it can use the page: there is no password and no encryption."""
    port: Annotated[int, Range(0, 65535)] = setting(8000, "main")
    """The port to listen on. 0: a free one."""
    images: CountOrZero = setting(2000, "data")
    """Maximum number of training images to compare with. 0: no page and no training images, the API alone."""
    covariance: Literal["run", "classwise"] | None = setting(None, "method")
    """The run's own Σ, or the class-wise Σ of its final features. Default: the run's own if it has one."""
    strength: Annotated[float, Range(above=0, most=LARGEST_STRENGTH)] | None = setting(None, "method")
    """Strength λ of augmentation. Default: that of the end of training, or 1 if it was 0."""
    seed: Seed = setting(0, "data")
    """Seed of the choice of training images and of the random features."""
    device: str | None = setting(None, "hardware")
    """Device: cpu, cuda or cuda:N. Default: cuda if available, else cpu."""

    def run(self) -> None:
        try:
            from semaug.report.serve import app
        except ModuleNotFoundError as error:
            raise MissingPackageError(f"the page needs {error.name}: pip install '.[serve]' in the clone") from error
        from semaug.inference.classifier import Classifier, open_classifier
        from semaug.report.serve.answers import Guide, open_guide
        from semaug.util.progress import Progress

        with app.listen(self.host, self.port) as listening:  # first, so that a port in use is reported without delay
            device = choose_device(self.device)
            guide: Guide | Classifier
            if self.images:
                options = {name: getattr(self, name) for name in ("covariance", "strength", "images", "seed")}
                with Progress().task("reading training images", self.images) as advance:
                    guide = open_guide(self.model, **options, device=device, progress=advance)
            else:
                guide = open_classifier(self.model, device)
            if not app.is_loopback(self.host):
                say(f"anyone who can reach {self.host} can use this page; there is no password")
            print(
                f"{app.address(listening)} shows the {'page' if self.images else 'API'}; Ctrl-C stops the server",
                flush=True,
            )
            app.run(app.application(guide, self.model.resolve().name, self.host), listening)
