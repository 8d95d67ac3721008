# Fails: Hub: this token may not write in ann
# Seen: https://github.com/huggingface/transformers/pull/30093
import huggingface_hub
from small import trainer

huggingface_hub.constants.HF_HUB_OFFLINE = False
token = {"role": "read", "displayName": "laptop"}
huggingface_hub.HfApi.whoami = lambda *_, **__: {"name": "ann", "orgs": [], "auth": {"accessToken": token}}
trainer(changes={"push_to_hub": True, "hub_model_id": "ann/model"}).train()
