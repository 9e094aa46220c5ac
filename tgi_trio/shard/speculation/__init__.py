"""Several tokens a step: guess what comes next, compute it in one go, keep what is right."""
