"""Algorithm 1: pseudo, meta and real update, the meta-gradient engines, and the public learners."""
