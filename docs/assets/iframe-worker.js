/* Search in pages opened as files, where a browser allows no workers: a frame runs the worker's script instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.frame = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === this.frame) {
          const message = new MessageEvent("message", { data: event.data });
          this.dispatchEvent(message);
          if (this.onmessage) this.onmessage(message);
        }
      });
      const page = this.frame.document;
      page.open();
      page.write(`<script>
        window.postMessage = (data) => parent.dispatchEvent(new MessageEvent("message", { data, source: window }));
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve) => {
          const script = document.createElement("script");
          script.src = url;
          script.addEventListener("load", resolve);
          document.body.appendChild(script);
        })), Promise.resolve());
      <\/script><body><script src="${url}"><\/script></body>`);
      page.close();
    }

    postMessage(data) {
      this.frame.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.frameElement.remove();
    }
  };
}
