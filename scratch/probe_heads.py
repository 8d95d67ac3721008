import warnings, inspect, sys, time, collections, signal, json
warnings.filterwarnings("ignore")
import torch, transformers
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
SMALL = {
 "vocab_size": 40, "hidden_size": 16, "d_model": 16, "n_embd": 16, "dim": 16, "embedding_size": 16, "emb_dim":16, "model_dim":16,
 "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers":2,
 "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_key_value_heads": 2,
 "intermediate_size": 32, "ffn_dim": 32, "d_ff": 32, "d_inner": 32, "n_inner": 32, "hidden_dim": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
 "max_position_embeddings": 64, "n_positions": 64, "head_dim": 8, "d_kv": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
 "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "image_size": 32, "patch_size": 8, "type_vocab_size": 2, "num_labels": 3,
 "state_size": 8, "mamba_d_state":8,"kv_lora_rank":8,"q_lora_rank":8,"qk_rope_head_dim":4,"qk_nope_head_dim":4,"v_head_dim":8,
}
heads = json.load(open("/tmp/heads/heads.json"))
TASKS = ["CAUSAL_LM","SEQUENCE_CLASSIFICATION","TOKEN_CLASSIFICATION","QUESTION_ANSWERING","MASKED_LM","SEQ_TO_SEQ_CAUSAL_LM","MULTIPLE_CHOICE","IMAGE_CLASSIFICATION","NEXT_SENTENCE_PREDICTION","SEMANTIC_SEGMENTATION"]
class Slow(Exception): pass
def alarm(*_): raise Slow("slow")
signal.signal(signal.SIGALRM, alarm)
def shrink(config):
    for k,v in SMALL.items():
        if hasattr(config,k):
            try: setattr(config,k,v)
            except Exception: pass
    return config
def build(cls):
    cc = cls.config_class
    defaults = inspect.signature(cc.__init__).parameters
    base = cc()
    keys = {k:v for k,v in SMALL.items() if hasattr(base,k) and k not in ("num_labels",)}
    try: config = cc(**keys, num_labels=3)
    except Exception: config = shrink(cc())
    return cls(config), config
def inputs(task, cfg):
    torch.manual_seed(0)
    ids = torch.randint(5, 40, (4, 7)); mask = torch.ones_like(ids)
    lab = ids.clone(); lab[0,:3] = -100; lab[2,5:] = -100
    if task in ("CAUSAL_LM","MASKED_LM"): return dict(input_ids=ids, attention_mask=mask, labels=lab)
    if task=="SEQ_TO_SEQ_CAUSAL_LM": return dict(input_ids=ids, attention_mask=mask, labels=lab)
    if task=="SEQUENCE_CLASSIFICATION": return dict(input_ids=ids, attention_mask=mask, labels=torch.tensor([0,1,2,1]))
    if task=="NEXT_SENTENCE_PREDICTION": return dict(input_ids=ids, attention_mask=mask, labels=torch.tensor([0,1,1,1]))
    if task=="TOKEN_CLASSIFICATION": l = ids%3; l[0,:3]=-100; return dict(input_ids=ids, attention_mask=mask, labels=l)
    if task=="QUESTION_ANSWERING": return dict(input_ids=ids, attention_mask=mask, start_positions=torch.tensor([1,2,3,0]), end_positions=torch.tensor([3,3,4,1]))
    if task=="MULTIPLE_CHOICE": return dict(input_ids=ids.reshape(2,2,7), attention_mask=mask.reshape(2,2,7), labels=torch.tensor([0,1]))
    if task=="IMAGE_CLASSIFICATION":
        s=getattr(cfg,"image_size",32); s = s if isinstance(s,int) else 32
        return dict(pixel_values=torch.randn(4,getattr(cfg,"num_channels",3),s,s), labels=torch.tensor([0,1,2,1]))
    if task=="SEMANTIC_SEGMENTATION":
        return dict(pixel_values=torch.randn(2,3,32,32), labels=torch.randint(0,3,(2,32,32)))
res=[]; t00=time.time()
for task in TASKS:
    ok=0; n=0
    for tk, name in heads:
        if tk!=task: continue
        n+=1
        t0=time.time(); signal.alarm(8)
        try:
            cls=getattr(transformers,name)
            model,cfg=build(cls); model.eval()
            x=inputs(task,cfg)
            p=inspect.signature(model.forward).parameters
            if "attention_mask" not in p: x.pop("attention_mask",None)
            with torch.no_grad(): out=model(**x)
            loss=out.loss if hasattr(out,"loss") else None
            ok+=loss is not None
            res.append((task,name,"ok" if loss is not None else "noloss",round(time.time()-t0,2), sum(q.numel() for q in model.parameters())))
        except BaseException as e:
            if isinstance(e,KeyboardInterrupt): raise
            res.append((task,name,f"{type(e).__name__}: {str(e)[:100]}",round(time.time()-t0,2),0))
        finally: signal.alarm(0)
    print(task,ok,n,round(time.time()-t00),flush=True)
json.dump(res,open("/tmp/heads/res.json","w"),indent=0)
c=collections.Counter(r[2][:70] for r in res); 
for k,v in c.most_common(40): print(v,k)
