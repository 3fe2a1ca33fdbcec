"""Lightning takes a DataLoader apart and makes it anew with a sampler of its own; ours must stay ours in that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.data as tud

import penstock as ps

pytest.importorskip("lightning", reason="needs the package lightning")

pytestmark = [pytest.mark.interop, pytest.mark.processes, pytest.mark.filterwarnings("ignore")]


class Rows(tud.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index)), index


def test_a_loader_that_is_made_anew_keeps_its_kind_and_arguments() -> None:
    from lightning.pytorch.utilities.data import _update_dataloader

    loader = ps.DataLoader(Rows(), 8, shuffle=True, num_workers=2, persistent_workers=True, seeding="torch", name="x")
    remade: Any = _update_dataloader(loader, tud.DistributedSampler(Rows(), num_replicas=2, rank=0))
    assert type(remade) is ps.DataLoader
    assert (remade.seeding, remade.name, remade.batch_size, remade.num_workers) == ("torch", "x", 8, 2)
    assert remade.persistent_workers
    assert [len(batch[1]) for batch in remade] == [8, 8, 4]


def test_a_trainer_trains_on_it() -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.seen: list[int] = []

        def training_step(self, batch: Any, step: int) -> torch.Tensor:
            self.seen += batch[1].tolist()
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ps.DataLoader(Rows(), 8, shuffle=True, num_workers=2, persistent_workers=True))
    assert sorted(module.seen[:40]) == sorted(module.seen[40:]) == list(range(40))
    assert module.seen[:40] != module.seen[40:]
