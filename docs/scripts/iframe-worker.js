// Search of a site that is opened from files. The theme searches in a web worker, which browsers refuse to such a page;
// there a hidden frame runs the same script. The theme's plugin `offline` expects "iframe-worker" in this file's name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.loaded = new Promise((resolve, reject) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.onload = () => {
          frame.onload = null;
          this.inside = frame.contentWindow;
          this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
          const script = frame.contentDocument.createElement("script");
          script.onload = resolve;
          script.onerror = () => reject(new Error(`${url} cannot be loaded`));
          script.src = url;
          frame.contentDocument.body.append(script);
        };
        document.body.append(frame);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
