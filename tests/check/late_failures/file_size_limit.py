# Fails: save: DiskFull: [Errno 28] No space left on device
import resource

from small import trainer

resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))
trainer().train()
