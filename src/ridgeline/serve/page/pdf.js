// The text of a PDF: read here in the browser, in a worker, by Mozilla's pdf.js, which is fetched when first needed.

const WORKER = new URL('./vendor/pdfjs-dist-5.6.205/pdf.worker.min.mjs', import.meta.url).href;
const ERRORS = { // by name, as the library has them
  PasswordException: 'is locked with a password: save it without one',
  InvalidPDFException: 'is damaged, or no PDF',
};

/** Return the text of a PDF, its pages divided by empty lines. Throws an Error whose message goes on with the file's name. */
export async function textOfPdf(bytes) {
  const library = await import('./vendor/pdfjs-dist-5.6.205/pdf.min.mjs').catch(() => {
    throw new Error('cannot be read: this browser is too old for it, or the server is away');
  });
  library.GlobalWorkerOptions.workerSrc = WORKER;
  const task = library.getDocument({ data: bytes, verbosity: 0, disableFontFace: true, useWasm: false });
  try {
    const document = await task.promise;
    const pages = [];
    for (let i = 1; i <= document.numPages; i += 1) {
      const { items } = await (await document.getPage(i)).getTextContent();
      pages.push(items.map(({ str, hasEOL }) => (hasEOL ? `${str}\n` : str)).join('').trim());
    }
    const text = pages.join('\n\n').trim();
    if (!text) throw new Error('has no text: it may be a scan, which needs text recognition first');
    return text;
  } catch (error) {
    throw ERRORS[error.name] ? new Error(ERRORS[error.name]) : error;
  } finally {
    task.destroy();
  }
}
