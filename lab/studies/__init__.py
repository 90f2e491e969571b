"""The lab's own studies: sweeps whose cells the lab chose to answer one question."""
