"""The commands of `lab`, a file a family. Heavy imports live inside them: `lab --help` is quick."""
