"""Lightning's strategies, adapted to a Trainer, and their choice by the arguments."""
