"""The processes that train together: who this one is, their process group, how they are started, what they exchange."""
