# Fails: outlier rows, row 55 (the longest input_ids): ValueError: zip() argument 2 is shorter
from small import pad, texts, trainer


def pairs(rows):
    return pad([row for pair in zip(rows[::2], rows[1::2], strict=True) for row in pair])


trainer(train_dataset=texts(89), data_collator=pairs, eval_dataset=texts(32, 1)).train()
