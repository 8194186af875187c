"""The GPU Migration Toolkit turns `torch.cuda` into the card while it is imported: nothing here does."""

from gaudi_emulator.scope import OutOfScope

raise OutOfScope("gpu_migration", "hpu in the place of cuda, by hand")
