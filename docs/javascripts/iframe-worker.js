// Browsers start no worker from a page that is a file. The site's search then works in a hidden frame of the page.
if (location.protocol === "file:") {
  // The theme looks for the second name.
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.ready = new Promise((resolve) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow;
          inside.importScripts = (...urls) =>
            urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve());
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          resolve(this.load(url));
        };
      });
      document.documentElement.append(this.frame);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.frame.contentDocument.head.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
